"""A picture of where each argument of FSDP1 went: old names at the left, new ones at the right, a line between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.notebook.drawing.style import INK, MUTED, WIDTH_IN, Picture, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labkit.spmd.trace.fsdp_mapping import MovedArgument

_ROW_IN = 0.2
_HEAD_IN, _FOOT_IN = 0.3, 0.3
_OLD_X, _NEW_X = 1.45, 3.3
# Colour, line, and width: the line style alone distinguishes the kinds in black and white.
_LINES: dict[str, tuple[str, Any, float]] = {
    "changed": ("#D55E00", "solid", 1.6),
    "your code": ("#009E73", (0, (1.5, 1.2)), 1.6),
    "gone": ("#767676", (0, (1, 3)), 1.2),
}
_ENDS = {"your code": "your own code", "gone": "always on"}
_MEANING = {
    "changed": "another behaviour",
    "your code": "torch no longer does it",
    "gone": "no choice left",
}


def mapping_picture(moves: Sequence[MovedArgument], *, caption: str = "") -> Picture:
    """Draw a mapping of arguments.

    Args:
        moves: Old and new names, such as `labkit.spmd.trace.fsdp_mapping.ARGUMENTS`. Names with the same target should be adjacent.
        caption: The line under the picture; by default a count of each kind.

    Ranks: controller.
    """
    targets = list(dict.fromkeys(_target(move) for move in moves))
    height = _HEAD_IN + len(moves) * _ROW_IN + _FOOT_IN
    with figure(height_in=height) as fig:
        fig.set_layout_engine("none")
        axes = fig.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.axis("off")
        axes.set_xlim(0, WIDTH_IN)
        axes.set_ylim(height, 0)
        axes.text(_OLD_X, 0.13, "FSDP(...)", ha="right", va="center", weight="bold", fontsize=9)
        axes.text(_NEW_X, 0.13, "fully_shard(...)", va="center", weight="bold", fontsize=9)
        step = (len(moves) - 1) / max(len(targets) - 1, 1) * _ROW_IN
        at = {target: _HEAD_IN + _ROW_IN / 2 + place * step for place, target in enumerate(targets)}
        for row, move in enumerate(moves):
            _draw_move(axes, move, _HEAD_IN + (row + 0.5) * _ROW_IN, at[_target(move)])
        for target, y in at.items():
            own = target in _ENDS.values()
            axes.text(_NEW_X, y, target, va="center", fontsize=8, style="italic" if own else "normal", color=MUTED if own else INK)
        _draw_legend(axes, height - 0.12)
        rows = [(move.old, move.new or _ENDS[move.kind], move.kind, move.note) for move in moves]
        return Picture.from_figure(
            fig, alt=_alt(moves), caption=caption or _alt(moves), columns=("FSDP1", "FSDP2", "what became of it", "note"), rows=rows
        )


def _target(move: MovedArgument) -> str:
    return move.new or _ENDS[move.kind]


def _draw_move(axes: Axes, move: MovedArgument, old_y: float, new_y: float) -> None:
    color, style, width = _LINES[move.kind]
    axes.text(_OLD_X, old_y, move.old, ha="right", va="center", fontsize=8)
    start, stop = _OLD_X + 0.08, _NEW_X - 0.08
    axes.plot([start, stop], [old_y, new_y], color=color, ls=style, lw=width)


def _draw_legend(axes: Axes, y: float) -> None:
    x = 0.1
    for kind, (color, style, width) in _LINES.items():
        axes.plot([x, x + 0.3], [y, y], color=color, ls=style, lw=width)
        axes.text(x + 0.36, y, _MEANING[kind], va="center", fontsize=7.5, color=INK)
        x += 0.36 + 0.058 * len(_MEANING[kind]) + 0.16


def _alt(moves: Sequence[MovedArgument]) -> str:
    counts = {kind: sum(move.kind == kind for move in moves) for kind in _LINES}
    return (
        f"Of {len(moves)} arguments of FSDP1, {counts['changed']} have a successor that behaves differently, "
        f"{counts['your code']} became your own code, and {counts['gone']} are gone."
    )
