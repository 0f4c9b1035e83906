"""The roofline of an offload: the least time of a step as more and more bytes move, and the time it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from labkit.notebook.drawing.style import INK, MUTED, Picture, figure

Point = tuple[float, float]

_MARKS = (("o", "#0072B2"), ("s", "#D55E00"), ("^", "#009E73"), ("v", "#CC79A7"))


def roofline(
    line: Sequence[Point], points: Mapping[str, Sequence[Point]], *, predicted: Sequence[Point] = (), caption: str
) -> Picture:
    """Draw the least step time over the bytes that move, and measured steps above it.

    Args:
        line: (bytes moved in each direction, least seconds), at least two points, with growing bytes. Where the line is flat, the
            computation limits the step; where it rises, the bus does.
        points: Per series, measured (bytes, seconds).
        predicted: The predictions of a finer model, as (bytes, seconds); drawn as crosses.
        caption: The line under the picture.

    Returns:
        The picture, 6 by 2.8 inches.

    Raises:
        ValueError: The line has fewer than two points, or there are no measurements.

    Ranks: controller or local.
    """
    if len(line) < 2:
        raise ValueError("a line needs two points")
    if not any(points.values()):
        raise ValueError("a roofline needs measured points")
    scale, unit = (1e9, "GB") if max(x for x, _ in line) >= 2e9 else (1e6, "MB")
    with figure(height_in=2.8) as fig:
        ax = fig.add_subplot()
        xs, ys = [x / scale for x, _ in line], [1000 * y for _, y in line]
        top = 1.15 * max(ys + [1000 * y for series in (predicted, *points.values()) for _, y in series])
        ax.plot(xs, ys, color=INK, lw=1.6, label="roofline: the slower of computation and bus")
        if predicted:
            x, y = [x / scale for x, _ in predicted], [1000 * y for _, y in predicted]
            ax.plot(x, y, ls="", marker="x", ms=8, mec=INK, mew=1.3, label="predicted, block by block")
        if (knee := _knee(line)) is not None:
            ax.axvline(knee / scale, color=MUTED, ls=":", lw=1.0)
            # Label a side only if the words fit there.
            if knee / scale > 0.25 * xs[-1]:
                ax.text(knee / scale, 0.03 * top, "computation decides  ", ha="right", va="bottom", color=MUTED)
            if knee / scale < 0.8 * xs[-1]:
                ax.text(knee / scale, 0.03 * top, "  the bus decides", ha="left", va="bottom", color=MUTED)
        for (name, series), (mark, color) in zip(points.items(), _MARKS, strict=False):
            x, y = [x / scale for x, _ in series], [1000 * y for _, y in series]
            ax.plot(x, y, ls="", marker=mark, ms=6, mfc=color, mec=INK, mew=0.7, label=f"measured: {name}")
        ax.set_ylim(0, top)
        ax.set_xlabel(f"moved in each direction in a step, {unit}")
        ax.set_ylabel("a step, ms")
        ax.grid(color=MUTED, alpha=0.25, lw=0.6)
        fig.legend(loc="outside upper left", ncols=2, columnspacing=1.4)
        measured = [(name, x, y) for name, series in points.items() for x, y in series]
        return Picture.from_figure(
            fig,
            alt=_alt(line, measured),
            caption=caption,
            columns=("measured", "bytes moved", "step, ms", "roofline, ms"),
            rows=[(name, f"{x:,.0f}", f"{1000 * y:.1f}", f"{1000 * _at(line, x):.1f}") for name, x, y in measured],
        )


def _knee(line: Sequence[Point]) -> float | None:
    """Return the x where the prediction begins to rise; None if it stays flat."""
    floor = line[0][1]
    flat = [x for x, y in line if y <= floor * (1 + 1e-9)]
    return flat[-1] if len(flat) < len(line) else None


def _at(line: Sequence[Point], x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(line):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * ((x - x0) / (x1 - x0) if x1 > x0 else 0.0)
    return line[0][1] if x < line[0][0] else line[-1][1]


def _alt(line: Sequence[Point], measured: Sequence[tuple[str, float, float]]) -> str:
    knee = _knee(line)
    shape = (
        f"flat at {1000 * line[0][1]:.0f} ms up to {knee:,.0f} bytes, then rising to {1000 * line[-1][1]:.0f} ms"
        if knee is not None
        else f"flat at {1000 * line[0][1]:.0f} ms"
    )
    many = f"{len(measured)} steps were measured" if len(measured) > 1 else "One step was measured"
    off = max(measured, key=lambda point: abs(point[2] - _at(line, point[1])))
    return (
        f"The least step time is {shape}. {many}; the one that is furthest from the line moves "
        f"{off[1]:,.0f} bytes and took {1000 * off[2]:.0f} ms where the line is at {1000 * _at(line, off[1]):.0f} ms."
    )
