"""Controls over a picture: their options, the effect of a move, and their use in the planner."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.notebook.drawing.style import Picture
from labkit.notebook.views import planning as module
from labkit.notebook.views.explore import Choices, ControlError, Explorer, FreeText
from labkit.notebook.views.planning import meshes, num_shards, planner, verdict

MIB = 1 << 20


def controls() -> dict[str, Any]:
    return {"ranks": [1, 2, 4, 8], "mesh": meshes, "dtype": ["float32", "bfloat16"]}


def test_what_is_not_chosen_is_the_first_option() -> None:
    assert Choices(controls()).values == {"ranks": 1, "mesh": "1 x 1", "dtype": "float32"}
    assert Choices(controls(), {"ranks": 8, "mesh": "2 x 4"}).values == {"ranks": 8, "mesh": "2 x 4", "dtype": "float32"}


def test_options_follow_from_what_was_chosen_before_them_and_choices_stay_while_they_can() -> None:
    choices = Choices(controls(), {"ranks": 8, "mesh": "2 x 4", "dtype": "bfloat16"})
    choices.choose("ranks", 4)
    assert choices.options["mesh"] == ["1 x 4", "2 x 2"]
    assert choices.values == {"ranks": 4, "mesh": "1 x 4", "dtype": "bfloat16"}
    choices.choose("dtype", "float32")
    assert choices.values == {"ranks": 4, "mesh": "1 x 4", "dtype": "float32"}


@pytest.mark.parametrize(
    ("options", "start", "message"),
    [
        ({"ranks": []}, {}, "ranks has no options"),
        (controls(), {"ranks": 3}, r"ranks starts from 3, which is not one of its options: \[1, 2, 4, 8\]"),
        (controls(), {"ranks": 4, "mesh": "4 x 2"}, "mesh starts from '4 x 2'"),
        (controls(), {"rank": 4}, "no control is called rank; there are ranks, mesh, dtype"),
    ],
)
def test_a_start_that_cannot_be_is_refused(options: dict[str, Any], start: dict[str, Any], message: str) -> None:
    with pytest.raises(ControlError, match=message):
        Choices(options, start)


def test_an_option_that_is_not_there_cannot_be_chosen_and_changes_nothing() -> None:
    choices = Choices(controls())
    with pytest.raises(ControlError, match="ranks has no option 3"):
        choices.choose("ranks", 3)
    assert choices.values["ranks"] == 1


def test_a_free_text_takes_any_text_and_stays_when_others_move() -> None:
    choices = Choices({"name": FreeText("a name"), "part": ["all", "model"]})
    assert choices.values == {"name": "", "part": "all"}
    choices.choose("name", "*.weight")
    choices.choose("part", "model")
    assert choices.values == {"name": "*.weight", "part": "model"}


def test_meshes_are_all_divisions_into_replicas_and_at_least_two_shards() -> None:
    assert meshes(1) == ["1 x 1"]
    assert meshes(2) == ["1 x 2"]
    assert meshes(12) == ["1 x 12", "2 x 6", "3 x 4", "4 x 3", "6 x 2"]
    assert [num_shards(mesh) for mesh in meshes(12)] == [12, 6, 4, 3, 2]


def test_the_verdict_says_by_how_much() -> None:
    assert verdict(3 * MIB, 4 * MIB) == "3.00 of 4 MiB: fits, 1.00 MiB are free."
    assert verdict(3 * MIB, int(1.5 * MIB)) == "3.00 of 1.5 MiB: 1.50 MiB too much."


def test_the_planner_draws_what_is_chosen_beside_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Picture] = []

    def explore(draw: Any, options: Any, start: Any) -> None:
        choices = Choices(options, start)
        drawn.append(draw(**choices.values))
        choices.choose("ranks", 4)
        choices.choose("mesh", "2 x 2")
        drawn.append(draw(**choices.values))

    monkeypatch.setattr(module, "explore", explore)
    planner(
        lambda shards, dtype, blocks: {"parameters": 8 * MIB // shards, "activations": MIB},
        ranks=[1, 4],
        dtypes=["float32"],
        blocks=["keep"],
        limits_mib=[6],
    )
    first, second = drawn
    assert first.caption == "1 rank as 1 x 1, float32, blocks: keep. 9.00 of 6 MiB: 3.00 MiB too much."
    assert second.caption == "4 ranks as 2 x 2, float32, blocks: keep. 5.00 of 6 MiB: fits, 1.00 MiB are free."
    assert [row[:3] for row in second.rows] == [("start", "8,388,608", "1,048,576"), ("chosen", "4,194,304", "1,048,576")]
    assert second.alt.endswith("The limit is 6,291,456 bytes.")


def test_outside_a_notebook_the_picture_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    picture = Picture("<svg/>", b"", 6.0, "Alt.", "Caption.", ("a",), (("1",),))
    Explorer(lambda ranks: picture, Choices({"ranks": [1]})).show()
    assert capsys.readouterr().out.startswith("Caption.\nAlt.\n")
