"""The pictures of lab 02: bars of memory, and the roofline with its points."""

from __future__ import annotations

import subprocess
import sys
import xml.dom.minidom
from dataclasses import dataclass

import pytest

from labkit.notebook.drawing.style import Picture
from labkit.notebook.pictures.bars import memory_bars
from labkit.notebook.pictures.rooflines import roofline

KEEP = {"parameters": 3 << 20, "gradients": 0, "activations": 5 << 20}
MOVE = {"parameters": 3 << 20, "gradients": 0, "activations": 1 << 20}
LINE = [(0.0, 0.1), (10e6, 0.1), (30e6, 0.3)]


@dataclass
class Parts:
    parameters: int
    activations: int


def check_complete(picture: Picture) -> None:
    xml.dom.minidom.parseString(picture.svg)
    assert picture.png.startswith(b"\x89PNG")
    assert len(picture.svg) < 200_000


def test_bars_show_every_part_that_is_there_and_the_measured_peak() -> None:
    picture = memory_bars({"keep": KEEP, "move": MOVE}, {"keep": 9 << 20}, caption="Two ways.", limit_bytes=6 << 20)
    check_complete(picture)
    assert picture.columns == ("way", "parameters", "activations", "together", "measured")  # no gradients anywhere
    assert picture.rows == (
        ("keep", "3,145,728", "5,242,880", "8,388,608", "9,437,184"),
        ("move", "3,145,728", "1,048,576", "4,194,304", "-"),
    )
    assert picture.alt == (
        "Stacked bars. keep: 8,388,608 bytes, most of them activations (5,242,880), measured 9,437,184; "
        "move: 4,194,304 bytes, most of them parameters (3,145,728). "
        "The limit is 6,291,456 bytes."
    )


def test_bars_take_objects_with_parts_and_parts_of_any_name() -> None:
    check_complete(memory_bars({"a": Parts(1, 2), "b": Parts(3, 4)}, caption="Objects."))
    check_complete(memory_bars({"a": dict.fromkeys(["one", "two", "three", "four", "five"], 7)}, caption="Other names."))


@pytest.mark.parametrize(
    ("parts", "measured", "message"),
    [
        ({}, None, "no bar"),
        ({"keep": KEEP, "move": {"parameters": 1}}, None, "move has the parts"),
        ({"keep": KEEP}, {"move": 1}, r"without a bar: \['move'\]"),
    ],
)
def test_bars_that_cannot_be_compared_are_refused(
    parts: dict[str, dict[str, int]], measured: dict[str, int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        memory_bars(parts, measured, caption="")


def test_a_roofline_names_its_knee_and_the_point_that_is_furthest_off() -> None:
    points = {"blocks": [(0.0, 0.11), (20e6, 0.25)], "inputs": [(1e6, 0.12)]}
    picture = roofline(LINE, points, predicted=[(20e6, 0.21)], caption="Steps.")
    check_complete(picture)
    assert picture.rows[1] == ("blocks", "20,000,000", "250.0", "200.0")
    assert picture.alt == (
        "The least step time is flat at 100 ms up to 10,000,000 bytes, then rising to 300 ms. 3 steps were measured; the one "
        "that is furthest from the line moves 20,000,000 bytes and took 250 ms where the line is at 200 ms."
    )


def test_a_flat_roofline_has_no_knee() -> None:
    picture = roofline([(0.0, 0.1), (5e9, 0.1)], {"steps": [(0.0, 0.1)]}, caption="Flat.")
    check_complete(picture)
    assert "flat at 100 ms. One step was measured" in picture.alt


@pytest.mark.parametrize(
    ("line", "points", "message"), [(LINE[:1], {"a": [(0.0, 1.0)]}, "two points"), (LINE, {"a": []}, "needs measured points")]
)
def test_a_roofline_without_a_line_or_points_is_refused(
    line: list[tuple[float, float]], points: dict[str, list[tuple[float, float]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        roofline(line, points, caption="")


def test_the_pictures_load_neither_torch_nor_matplotlib_before_they_draw() -> None:
    modules = ("pictures.bars", "pictures.rooflines", "pictures.memory_timelines", "views.planning", "views.checkpoint_browser")
    imports = ", ".join(f"labkit.notebook.{name}" for name in modules)
    code = f"import sys, {imports}; sys.exit(bool({{'torch', 'matplotlib', 'ipywidgets'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
