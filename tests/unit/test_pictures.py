"""Pictures are drawn from the given values, and mark values that the collective would not produce."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from labkit.base.ranks import RankResults
from labkit.notebook.drawing.boxes import number_text
from labkit.notebook.pictures.collectives import collective_picture, process_picture

ROWS = {0: [1, 2], 1: [10, 20]}


def drawn_words(svg: str) -> list[str]:
    """The texts in a matplotlib SVG: it writes each one as a comment before its glyphs."""
    return re.findall(r"<!-- (.*?) -->", svg)


def test_all_gather_of_real_values_has_no_strange_box() -> None:
    picture = collective_picture("all_gather", {0: [1], 1: [11]}, {0: [1, 11], 1: [1, 11]})
    assert "Dashed" not in picture.caption
    assert picture.alt == "Before the all-gather, rank 0 holds 1; rank 1 holds 11. After it, every rank holds 1, 11."
    assert picture.rows == (("0", "1", "1, 11"), ("1", "11", "1, 11"))
    assert drawn_words(picture.svg).count("11") == 3


def test_reduce_scatter_gives_each_rank_its_piece_of_the_sum() -> None:
    picture = collective_picture("reduce_scatter", ROWS, {0: [11], 1: [22]})
    assert "Dashed" not in picture.caption
    assert picture.rows == (("0", "1, 2", "11"), ("1", "10, 20", "22"))
    assert {"piece 0", "piece 1", "11", "22"} <= set(drawn_words(picture.svg))


def test_pieces_of_different_length_are_laid_behind_each_other() -> None:
    picture = collective_picture("reduce_scatter", {0: [1, 2, 3], 1: [1, 2, 3]}, {0: [2, 4], 1: [6]})
    assert "Dashed" not in picture.caption
    picture = collective_picture("all_gather", {0: [1, 2], 1: []}, {0: [1, 2], 1: [1, 2]})
    assert "Dashed" not in picture.caption
    assert "rank 1 holds nothing" in picture.alt


def test_all_reduce_gives_every_rank_the_whole_sum() -> None:
    picture = collective_picture("all_reduce", ROWS, {0: [11, 22], 1: [11, 22]})
    assert "Dashed" not in picture.caption
    assert picture.alt.endswith("After it, every rank holds 11, 22.")


@pytest.mark.parametrize(
    ("collective", "before", "after", "strange"),
    [
        ("all_gather", {0: [1], 1: [11]}, {0: [1, 11], 1: [11, 1]}, "2 of these values are not"),
        ("reduce_scatter", ROWS, {0: [22], 1: [11]}, "2 of these values are not"),
        ("all_reduce", ROWS, {0: [11, 22], 1: [10, 22]}, "1 of these values is not"),
        ("all_reduce", {0: [3], 1: [3]}, {0: [3.0], 1: [3.0]}, "2 of these values are not"),
    ],
)
def test_values_that_the_collective_does_not_give_are_marked(collective: str, before: object, after: object, strange: str) -> None:
    picture = collective_picture(collective, before, after)  # type: ignore[arg-type]
    assert strange in picture.alt
    assert "Dashed: not what the" in picture.caption
    assert drawn_words(picture.svg).count("?") == int(strange[0])


def test_float32_rounding_is_not_strange_but_a_wrong_digit_is() -> None:
    before = {rank: np.float32([0.1 * (rank + 1), 1e4]) for rank in range(3)}
    total = before[2] + before[1] + before[0]
    assert "Dashed" not in collective_picture("all_reduce", before, dict.fromkeys(range(3), total)).caption
    off = total * np.float32(1.001)
    assert "Dashed" in collective_picture("all_reduce", before, dict.fromkeys(range(3), off)).caption


def test_arrays_numbers_and_rank_results_are_read() -> None:
    before = RankResults({1: np.array([[1, 2], [3, 4]]), 0: np.zeros((2, 2))})
    picture = collective_picture("all_reduce", before, {0: np.array([[1, 2], [3, 4]]), 1: (1, 2, 3, 4)})
    assert picture.rows == (("0", "0, 0, 0, 0", "1, 2, 3, 4"), ("1", "1, 2, 3, 4", "1, 2, 3, 4"))
    assert collective_picture("all_gather", {0: 7}, {0: 7}).rows == (("0", "7", "7"),)


@pytest.mark.parametrize(
    ("collective", "before", "after", "reason"),
    [
        ("all_gather", {0: [1], 1: [2]}, {0: [1, 2]}, "pull both from the same ranks"),
        ("all_gather", {0: [1], 1: [2]}, {0: [1, 2], 1: [1]}, "rank 1 holds 1 values where 2 are expected"),
        ("all_reduce", {0: [1], 1: [2, 3]}, {0: [3], 1: [3]}, "rank 1 holds 2 values where 1 are expected"),
        ("reduce_scatter", ROWS, {0: [11], 1: [22, 0]}, "hold 3 values, before it 2"),
        ("all_reduce", {0: range(17)}, {0: range(17)}, "readable up to 16"),
        ("all_reduce", {rank: [1] for rank in range(17)}, {}, "1 to 16 ranks, not 17"),
        ("all_reduce", {}, {}, "1 to 16 ranks, not 0"),
    ],
)
def test_values_that_cannot_be_drawn_are_refused(collective: str, before: object, after: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        collective_picture(collective, before, after)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 4, 16])
def test_pictures_stay_whole_at_each_world_size(world_size: int) -> None:
    pieces = {rank: [10 * rank] for rank in range(world_size)}
    whole = {rank: [10 * other for other in range(world_size)] for rank in range(world_size)}
    for picture in (collective_picture("all_gather", pieces, whole), process_picture(1, dict.fromkeys(range(world_size), 99999))):
        ET.fromstring(picture.svg)
        image = np.asarray(Image.open(io.BytesIO(picture.png)).convert("L"))
        edges = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert edges.min() == 255, "ink touches the edge of the picture: something is cut off"
        assert image.min() < 60


def test_each_rank_is_named_in_ink_and_not_by_colour_alone() -> None:
    picture = collective_picture("all_gather", {0: [5], 1: [6]}, {0: [5, 6], 1: [5, 6]})
    words = drawn_words(picture.svg)
    # A row label each, and under each of the three boxes with its value.
    assert words.count("rank 0") == words.count("rank 1") == 4


def test_many_sources_are_named_as_a_range() -> None:
    before = {rank: [1] * 8 for rank in range(8)}
    picture = collective_picture("reduce_scatter", before, {rank: [8] for rank in range(8)})
    assert drawn_words(picture.svg).count("0-7") == 8


def test_process_picture_names_the_kernel_and_each_rank() -> None:
    picture = process_picture(4711, {1: 4713, 0: 4712})
    assert picture.rows == (("kernel", "4711"), ("rank 0", "4712"), ("rank 1", "4713"))
    assert picture.alt == "The kernel, process 4711, sends cells to 2 ranks: rank 0 is process 4712, rank 1 is process 4713."
    with pytest.raises(ValueError, match="1 to 16 ranks"):
        process_picture(1, {})


@pytest.mark.parametrize(
    ("value", "text"), [(3.0, "3"), (12345.0, "12345"), (-0.5, "-0.5"), (0.123456, "0.1235"), (2e9, "2e+09"), (float("nan"), "nan")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text
