from __future__ import annotations

import pytest

from labkit.notebook.drawing.style import Picture, figure, rank_style, text_color_on, text_table


def test_ranks_keep_their_colours() -> None:
    # The palette of Okabe and Ito; a changed order would recolour every figure of the course.
    assert [rank_style(rank).color for rank in range(4)] == ["#0072B2", "#E69F00", "#009E73", "#CC79A7"]


def test_sixty_four_ranks_can_be_told_apart() -> None:
    assert len({(rank_style(rank).color, rank_style(rank).hatch) for rank in range(64)}) == 64


@pytest.mark.parametrize("rank", range(8))
def test_labels_on_every_rank_s_colour_reach_the_contrast_of_wcag_aa(rank: int) -> None:
    style = rank_style(rank)
    assert _contrast(style.color, style.text_color) >= 4.5


def test_text_is_black_on_light_and_white_on_dark() -> None:
    assert text_color_on("#FFFFFF") == "#000000"
    assert text_color_on("#000000") == "#FFFFFF"


def test_a_picture_without_alt_text_or_numbers_is_refused() -> None:
    with figure() as fig:
        fig.subplots()
        with pytest.raises(ValueError, match="alt text"):
            Picture.from_figure(fig, alt=" ", caption="c", columns=("a",), rows=[(1,)])
        with pytest.raises(ValueError, match="table"):
            Picture.from_figure(fig, alt="a", caption="c", columns=("a",), rows=[])
        with pytest.raises(ValueError, match="2 cells"):
            Picture.from_figure(fig, alt="a", caption="c", columns=("a", "b"), rows=[(1,)])


def test_settings_are_back_to_what_they_were_after_a_figure() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with figure() as fig:
        fig.subplots()
    assert dict(mpl.rcParams) == before


def test_numbers_in_text_tables_stand_to_the_right() -> None:
    assert text_table(("name", "n"), [("a", "1,024"), ("bb", "-3.5")]) == ["name      n", "a     1,024", "bb     -3.5"]


def _contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
