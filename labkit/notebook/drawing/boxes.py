"""A picture of values as boxes: a row per rank, a box per value, and under each value the ranks that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.base.plain_text import format_ranks
from labkit.notebook.drawing.style import FAINT, INK, MUTED, WIDTH_IN, rank_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_IN = 0.62  # left column, "rank 10"
_ARROW_IN = 0.95  # between the panels
_BOX_IN = 0.55
ROW_IN = 0.47
_DIGIT_IN = 0.09  # the narrowest band that can hold a rank
_STRIP = 0.34  # lower part of a box, which names the ranks that its value comes from
_TITLE_IN = 0.27
_PIECES_IN = 0.17  # the line of piece names


@dataclass(frozen=True)
class ValueBox:
    """One value on one rank.

    Attributes:
        column: Its place in the row, counted from 0.
        value: The number.
        sources: The ranks that it comes from, in ascending order; empty if the collective should not produce this value.
    """

    column: int
    value: float
    sources: tuple[int, ...]


Rows = dict[int, list[ValueBox]]


def canvas(fig: Figure) -> Axes:
    """Make axes over the whole figure whose unit is the inch, with the origin at the top left."""
    fig.set_layout_engine("none")
    ax = fig.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_xlim(0, fig.get_figwidth())
    ax.set_ylim(fig.get_figheight(), 0)
    ax.axis("off")
    return ax


def head_in(pieces: Mapping[int, int]) -> float:
    """Return the height of the text above the first row, in inches."""
    return _TITLE_IN + (_PIECES_IN if pieces else 0.0)


def draw_panels(ax: Axes, name: str, left: Rows, right: Rows, pieces: Mapping[int, int]) -> None:
    """Draw two panels of rows with an arrow between them.

    Args:
        ax: A `canvas`.
        name: The text over the arrow.
        left: The boxes of each rank before; a slot without a box is drawn as an empty frame.
        right: The boxes of the same ranks after.
        pieces: Per rank, the column where its piece starts; empty if no pieces are named.
    """
    columns = 1 + max((box.column for rows in (left, right) for row in rows.values() for box in row), default=0)
    box_in = min(_BOX_IN, (WIDTH_IN - _LABEL_IN - _ARROW_IN - 0.1) / (2 * columns))
    second = _LABEL_IN + columns * box_in + _ARROW_IN
    head = head_in(pieces)
    for start, title, rows in ((_LABEL_IN, "before", left), (second, "after", right)):
        ax.text(start, 0.12, title, weight="bold", va="center", fontsize=9)
        _draw_piece_names(ax, start, box_in, columns, pieces)
        for line, row in enumerate(rows.values()):
            _draw_row(ax, start, head + line * ROW_IN, box_in, columns, row)
    for line, rank in enumerate(left):
        ax.text(0.05, head + line * ROW_IN + 0.2, f"rank {rank}", weight="bold", va="center")
    middle = head + len(left) * ROW_IN / 2
    tail, tip = second - _ARROW_IN + 0.1, second - 0.1
    ax.annotate("", (tip, middle), (tail, middle), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.4})
    ax.text((tail + tip) / 2, middle - 0.08, name.replace("-", "-\n") if len(name) > 10 else name, ha="center", va="bottom")


def _draw_piece_names(ax: Axes, start: float, box_in: float, columns: int, pieces: Mapping[int, int]) -> None:
    ends = [*list(pieces.values())[1:], columns]
    for (rank, first), end in zip(pieces.items(), ends, strict=False):
        wide = (end - first) * box_in
        text = f"piece {rank}" if wide > 0.45 else str(rank)
        ax.text(start + first * box_in + wide / 2, _TITLE_IN + 0.06, text, ha="center", va="center", color=MUTED, fontsize=7.5)


def _draw_row(ax: Axes, x: float, y: float, box_in: float, columns: int, row: list[ValueBox]) -> None:
    from matplotlib.patches import Rectangle

    held = {box.column for box in row}
    for column in range(columns):
        if column not in held:
            ax.add_patch(Rectangle((x + column * box_in + 0.02, y), box_in - 0.04, 0.4, fill=False, ec=FAINT, lw=0.8))
    for box in row:
        _draw_box(ax, x + box.column * box_in + 0.02, y, box_in - 0.04, 0.4, box)


def _draw_box(ax: Axes, x: float, y: float, width: float, height: float, box: ValueBox) -> None:
    from matplotlib.patches import Rectangle

    one = rank_style(box.sources[0]) if len(box.sources) == 1 else None
    fill, ink = (one.color, one.text_color) if one else ("white", INK)
    ax.add_patch(Rectangle((x, y), width, height, fc=fill, ec=INK, lw=0.8, ls="-" if box.sources else (0, (3, 2))))
    text = number_text(box.value)
    size = min(10.0, width * 72 * 0.92 / (0.66 * len(text)))
    strip = height * _STRIP
    ax.text(x + width / 2, y + (height - strip) / 2 + 0.01, text, ha="center", va="center", color=ink, fontsize=size, weight="bold")
    if not box.sources:
        ax.text(x + width / 2, y + height - strip / 2, "?", ha="center", va="center", fontsize=7)
        return
    band = width / len(box.sources)
    if band < _DIGIT_IN:
        ax.text(x + width / 2, y + height - strip / 2, format_ranks(box.sources), ha="center", va="center", fontsize=6.5)
        return
    for i, rank in enumerate(box.sources):
        style, left = rank_style(rank), x + i * band
        if not one:
            ax.add_patch(Rectangle((left, y + height - strip), band, strip, fc=style.color, ec=INK, lw=0.5))
        label = f"rank {rank}" if band > 0.42 else str(rank)
        ax.text(left + band / 2, y + height - strip / 2, label, ha="center", va="center", color=style.text_color, fontsize=6.5)


def number_text(value: float) -> str:
    """Format a number with four significant digits, or in full if it is a whole number below a million."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e6 else format(value, ".4g")
