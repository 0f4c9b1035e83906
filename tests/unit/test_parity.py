from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from labkit.spmd.shards.parity import compare, require_equal
from labkit.spmd.shards.records import ParityError


def state(**changes: object) -> dict[str, object]:
    return {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), **changes}


def test_equal_states_are_equal_and_say_how_much_was_compared() -> None:
    result = compare(state(), state())
    assert result
    assert (result.num_tensors, result.num_elements, result.num_values) == (2, 10, 0)
    assert result.max_abs == 0.0
    assert str(result) == "equal: 2 tensors, 10 elements"


def test_keys_are_compared_in_both_directions() -> None:
    result = compare(state(c=torch.ones(1)), state(d=torch.ones(1)))
    assert [(difference.key, difference.kind) for difference in result.differences] == [("d", "missing"), ("c", "unexpected")]


def test_only_the_first_difference_of_a_key_counts() -> None:
    result = compare(state(a=torch.zeros(3, 2, dtype=torch.float64)), state())
    assert [difference.kind for difference in result.differences] == ["shape"]
    assert "shape (3, 2), expected (2, 3)" in str(result)


def test_equal_values_of_another_dtype_differ() -> None:
    result = compare(state(b=torch.ones(4, dtype=torch.float64)), state())
    assert [difference.kind for difference in result.differences] == ["dtype"]
    assert "dtype float64, expected float32" in str(result)


def test_a_value_s_difference_names_place_count_and_size() -> None:
    other = torch.arange(6.0).view(2, 3)
    other[1, 0] += 0.5
    other[1, 2] -= 2.0
    (difference,) = compare(state(a=other), state()).differences
    assert (difference.key, difference.kind, difference.max_abs) == ("a", "value", 2.0)
    assert difference.detail == "2 of 6 elements differ, first at (1, 0), at most by 2"


def test_the_smallest_possible_difference_is_found() -> None:
    nudged = torch.nextafter(torch.ones(4), torch.tensor(2.0))
    assert not compare(state(b=nudged), state())


def test_nan_differs_from_itself_and_shows_as_nan() -> None:
    broken = state(b=torch.tensor([1.0, math.nan, 1.0, 1.0]))
    result = compare(broken, broken)
    assert not result
    assert math.isnan(result.max_abs)


def test_equal_infinities_are_equal() -> None:
    infinite = torch.tensor([math.inf, -math.inf, 1.0, 2.0])
    assert compare(state(b=infinite), state(b=infinite.clone()))
    (difference,) = compare(state(b=torch.tensor([math.inf, -math.inf, 1.0, 5.0])), state(b=infinite)).differences
    assert difference.max_abs == 3.0


def test_a_tolerance_counts_only_when_asked_for() -> None:
    close = state(b=torch.full((4,), 1.0 + 1e-6))
    assert not compare(close, state())
    assert compare(close, state(), rtol=1e-5)
    assert not compare(state(b=torch.full((4,), 1.1)), state(), rtol=1e-5, atol=1e-6)


def test_a_tolerance_does_not_excuse_integers() -> None:
    assert not compare({"n": torch.tensor([100])}, {"n": torch.tensor([101])}, rtol=0.5)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [({}, {}), ({"lr": 0.1}, {"lr": 0.1}), ({"a": torch.empty(0, 3)}, {"a": torch.empty(0, 3)})],
    ids=["nothing", "no tensor", "no element"],
)
def test_a_comparison_of_nothing_is_refused(actual: dict[str, object], expected: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(actual, expected)


def test_an_empty_state_against_a_full_one_differs() -> None:
    result = compare({}, state())
    assert not result
    assert [difference.key for difference in result.differences if difference.kind == "missing"] == ["a", "b"]


def test_optimizer_dicts_are_compared_to_the_last_leaf() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert compare(first, second)
    second["param_groups"][1]["lr"] = 0.3
    (difference,) = compare(first, second).differences
    assert (difference.key, difference.detail) == ("param_groups/1/lr", "0.2, expected 0.3")


def test_integer_and_text_keys_are_different_keys() -> None:
    moments = {"exp_avg": torch.ones(2)}
    result = compare({"state": {"0": moments}}, {"state": {0: moments}})
    assert [(difference.key, difference.kind) for difference in result.differences] == [
        ("state/0/exp_avg", "missing"),
        ("state/'0'/exp_avg", "unexpected"),
    ]


def test_order_and_kind_of_mapping_do_not_count_but_an_empty_one_does() -> None:
    turned = OrderedDict(reversed(state().items()))
    assert compare(turned, state())
    assert not compare(state(extra={}), state())


def test_numbers_of_another_type_differ() -> None:
    result = compare(state(step=1, lr=torch.tensor(0.1)), state(step=1.0, lr=0.1))
    assert [difference.kind for difference in result.differences] == ["type", "type"]


def test_a_module_stands_for_its_state_dict() -> None:
    model = nn.BatchNorm1d(3)
    assert compare(model, model.state_dict())
    model.running_mean.add_(1.0)
    assert [difference.key for difference in compare(model, nn.BatchNorm1d(3)).differences] == ["running_mean"]


def test_require_equal_raises_with_every_key_up_to_eight() -> None:
    left = {f"p{i}": torch.zeros(2) for i in range(12)}
    right = {f"p{i}": torch.ones(2) for i in range(12)}
    with pytest.raises(ParityError, match="12 keys differ") as caught:
        require_equal(left, right)
    assert "p7" in str(caught.value)
    assert "and 4 more" in str(caught.value)
    assert len(caught.value.parity.differences) == 12
