"""Loss curves that should lie on top of each other, and the distance of each from the run that never stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labkit.notebook.drawing.style import INK, MUTED, Picture, figure, rank_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MAX_RUNS = len(_MARKERS)


def loss_curves(truth: Sequence[float], runs: Mapping[str, Sequence[float]], *, first_step: int = 0, caption: str = "") -> Picture:
    """Draw a run, and other runs that claim to continue it.

    Args:
        truth: Losses of the run that never stopped, in nats per byte; the last ones belong to the same steps as ``runs``.
        runs: By name, the losses of runs that were stopped and continued, each as long as the others.
        first_step: The step of the first entry of ``truth``.
        caption: The line under the picture.

    Returns:
        The picture: the curves at the left, and at the right the distance of each run from the truth on a logarithmic axis, where
            exact zeros have their own line.

    Raises:
        ValueError: There is no run or more than `MAX_RUNS`, the runs differ in length, or they are longer than ``truth``.

    Ranks: controller.
    """
    lengths = {len(losses) for losses in runs.values()}
    if not 1 <= len(runs) <= MAX_RUNS or len(lengths) != 1 or not 0 < (length := lengths.pop()) <= len(truth):
        raise ValueError(f"draw 1 to {MAX_RUNS} runs, all of the same length and none longer than the truth")
    steps = range(first_step, first_step + len(truth))
    continued, right = steps[-length:], truth[-length:]
    gaps = {name: [abs(a - b) for a, b in zip(losses, right, strict=True)] for name, losses in runs.items()}
    with figure(height_in=2.6) as fig:
        left_axes, right_axes = fig.subplots(1, 2)
        left_axes.plot(steps, truth, color=INK, lw=2.2, label="never stopped", zorder=1)
        floor = _floor(gaps)
        for place, (name, losses) in enumerate(runs.items()):
            look = {
                "marker": _MARKERS[place],
                "color": rank_style(place).color,
                "ms": 8 - place,
                "mfc": "none",
                "mew": 1.4,
                "lw": 0.9,
            }
            left_axes.plot(continued, losses, label=name, zorder=2 + place, ls="--", **look)
            right_axes.plot(continued, [max(gap, floor) for gap in gaps[name]], ls="--", zorder=2 + place, **look)
        _finish(left_axes, right_axes, floor)
        fig.legend(*left_axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7.5)
        worst = {name: max(gap) for name, gap in gaps.items()}
        alt = "; ".join(f"{name} is at most {gap:.2g} away" for name, gap in worst.items())
        rows = [(step, f"{right[i]:.6f}", *(f"{gaps[name][i]:.2g}" for name in runs)) for i, step in enumerate(continued)]
        return Picture.from_figure(
            fig,
            alt=f"Loss curves of {len(runs)} continued runs against the run that never stopped: {alt}.",
            caption=caption or "Left: the losses. Right: how far each is from the run that never stopped.",
            columns=("step", "never stopped", *runs),
            rows=rows,
        )


def _floor(gaps: Mapping[str, Sequence[float]]) -> float:
    """Return where to draw an exact zero: one to two decades below the smallest gap that is not zero."""
    smallest = min((gap for listed in gaps.values() for gap in listed if gap > 0), default=1e-7)
    return float(10.0 ** (math.floor(math.log10(smallest)) - 1))


def _finish(left: Axes, right: Axes, floor: float) -> None:
    left.set_xlabel("optimizer step")
    left.set_ylabel("loss (nats per byte)")
    right.set_yscale("log")
    right.axhline(floor, color=MUTED, lw=0.8)
    top = max(right.get_ylim()[1], floor * 1e4)
    decades = range(round(math.log10(floor)) + 1, math.ceil(math.log10(top)) + 1, 2)
    right.set_yticks([floor, *(10.0**decade for decade in decades)], ["equal", *(f"$10^{{{decade}}}$" for decade in decades)])
    right.minorticks_off()
    right.set_ylim(floor / 2.5, top)
    right.set_xlabel("optimizer step")
    right.set_ylabel("distance (nats per byte)")
    for axes in (left, right):
        axes.locator_params(axis="x", integer=True)
