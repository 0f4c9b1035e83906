"""Rank sets are read or refused with a reason; RankResults holds one value per rank."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.base.plain_text import format_ranks
from labkit.base.ranks import RankResults, parse_ranks
from labkit.errors import LabkitError, RankSpecError


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        (None, (0, 1, 2, 3)),
        ("all", (0, 1, 2, 3)),
        (2, (2,)),
        ([3, 0], (0, 3)),
        ((1, 1, 1), (1,)),
        (range(1, 3), (1, 2)),
        (np.int64(3), (3,)),
        (np.arange(2), (0, 1)),
        ({2, 0}, (0, 2)),
        ("0", (0,)),
        ("0,2", (0, 2)),
        ("1-3", (1, 2, 3)),
        ("0-1,3", (0, 1, 3)),
        (" 3 , 0 - 1 ", (0, 1, 3)),
        ("2-2", (2,)),
        ("0-2,1-3", (0, 1, 2, 3)),
    ],
)
def test_rank_set_is_read_in_every_form(spec: Any, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(spec, 4) == ranks


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (4, "rank 4 out of range: this pool has 4 ranks, 0 to 3"),
        (-1, "rank -1 out of range"),
        ([0, 7, 9], "ranks 7, 9 out of range"),
        ("2-5", "rank 4 out of range"),
        ("", "cannot read the rank set ''"),
        ("0,,1", "cannot read the rank set '0,,1'"),
        ("0;1", "at '0;1'"),
        ("zero", "at 'zero'"),
        ("-1", "at '-1'"),
        ("1-", "at '1-'"),
        ("1-2-3", "at '1-2-3'"),
        ("0x1", "at '0x1'"),
        ("3-1", "runs backwards. Write the lower rank first"),
        ([], "names no rank"),
        (True, "True is not a rank set"),
        ([True], "True is not a rank"),
        ([0.0], "0.0 is not a rank"),
        (["0"], "'0' is not a rank"),
        (1.5, "1.5 is not a rank set"),
        (object, "is not a rank set"),
    ],
)
def test_bad_rank_set_is_refused_with_what_to_write(spec: Any, says: str) -> None:
    with pytest.raises(RankSpecError) as caught:
        parse_ranks(spec, 4)
    assert says in str(caught.value)
    assert isinstance(caught.value, LabkitError)
    assert isinstance(caught.value, ValueError)


def test_huge_range_is_refused_without_being_written_out() -> None:
    with pytest.raises(RankSpecError, match="out of range") as caught:
        parse_ranks("0-999999999999", 4)
    assert len(str(caught.value)) < 300


def test_one_rank_world_is_spoken_of_in_the_singular() -> None:
    with pytest.raises(RankSpecError, match=r"this pool has 1 rank, 0 to 0\."):
        parse_ranks(1, 1)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_formatted_ranks_are_read_back_as_the_same_set(ranks: set[int]) -> None:
    assert set(parse_ranks(format_ranks(ranks), 41)) == ranks


def test_ranks_are_written_shortly() -> None:
    assert format_ranks([5, 2, 1, 0, 1]) == "0-2, 5"
    assert format_ranks([3]) == "3"
    assert format_ranks([]) == ""


def test_results_come_in_rank_order_whatever_order_they_arrived_in() -> None:
    results = RankResults({2: "c", 0: "a", 1: "b"})
    assert list(results.values()) == ["a", "b", "c"]
    assert results.ranks == (0, 1, 2)
    assert len(results) == 3
    assert results[2] == "c"
    assert dict(results) == {0: "a", 1: "b", 2: "c"}


def test_missing_rank_names_the_ranks_there_are() -> None:
    with pytest.raises(KeyError, match="no value from rank 1; this result has ranks 0, 2-3"):
        RankResults({0: 0, 2: 2, 3: 3})[1]
    assert RankResults({0: 5}).get(1) is None


@pytest.mark.parametrize(
    "value",
    [
        3,
        "text",
        None,
        torch.arange(3),
        torch.zeros(0),
        np.arange(3),
        np.float32(2),
        {"a": [torch.ones(2), 1]},
        (np.ones(2),),
        pd.DataFrame({"a": [1, None]}),
    ],
    ids=str,
)
def test_equal_values_are_one_value(value: Any) -> None:
    copy = pickle.loads(pickle.dumps(value))
    assert RankResults({0: value, 1: copy}).same() is value


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 2),
        (torch.arange(3), torch.arange(4)),
        (torch.zeros(1), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros((1, 3)), np.zeros(3)),
        ({"w": torch.zeros(2)}, {"w": torch.ones(2)}),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
        (torch.zeros(2), 0),
        (pd.DataFrame({"a": [1, 2]}), pd.DataFrame({"b": [1, 2]})),
    ],
    ids=str,
)
def test_different_values_are_refused_and_the_ranks_named(left: Any, right: Any) -> None:
    with pytest.raises(ValueError, match="ranks 0 and 3 returned different values"):
        RankResults({0: left, 2: left, 3: right}).same()


def test_object_with_a_shape_of_its_own_is_compared_as_a_whole() -> None:
    @dataclasses.dataclass(frozen=True)
    class Record:
        shape: tuple[int, ...]

    assert RankResults({0: Record((2, 3)), 1: Record((2, 3))}).same() == Record((2, 3))
    with pytest.raises(ValueError, match="ranks 0 and 1 returned different values"):
        RankResults({0: Record((2, 3)), 1: Record((2, 4))}).same()


def test_long_values_are_cut_in_the_message() -> None:
    with pytest.raises(ValueError, match="different values") as caught:
        RankResults({0: "a" * 1000, 1: "b"}).same()
    assert len(str(caught.value)) < 300


def test_equal_values_are_shown_once_with_their_ranks() -> None:
    results = RankResults({0: 1, 1: 1, 2: 7, 3: 1})
    assert repr(results) == "ranks 0-1, 3: 1\nrank 2: 7"


def test_html_escapes_what_the_ranks_returned() -> None:
    text = RankResults({0: "<b>&"})._repr_html_()
    assert "&#x27;&lt;b&gt;&amp;&#x27;" in text
    assert "<b>" not in text


def test_results_survive_pickling() -> None:
    assert dict(pickle.loads(pickle.dumps(RankResults({0: 1, 1: [2]})))) == {0: 1, 1: [2]}
