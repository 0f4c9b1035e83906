"""A picture of the parts of memory: one stacked bar per way to train, with the measured peak on it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

from labkit.notebook.drawing.style import INK, MUTED, Picture, figure, text_color_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One colour and hatch per part in the whole lab; in black and white, lightness and hatch distinguish the parts.
PART_LOOKS = {
    "parameters": ("#0072B2", ""),
    "weights": ("#0072B2", ""),
    "model and optimizer": ("#0072B2", ""),
    "gathered": ("#009E73", "---"),
    "gradients": ("#56B4E9", "///"),
    "optimizer": ("#999999", ""),
    "activations": ("#E69F00", "\\\\\\"),
    "again": ("#CC79A7", "xxx"),
    "in flight": ("#CC79A7", "xxx"),
    "temporary": ("#F0E442", ""),
}
_OTHER_LOOKS = (("#D55E00", ""), ("#FFFFFF", "|||"), ("#009E73", "+++"))
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_BAR_IN = 0.42


def memory_bars(
    parts: Mapping[str, Any],
    measured: Mapping[str, int] | None = None,
    *,
    caption: str,
    what: str = "memory of one rank",
    measured_label: str = "measured peak",
    limit_bytes: int | None = None,
) -> Picture:
    """Draw the parts of the memory for several ways to train.

    Args:
        parts: For each way, the bytes of each part: a mapping, or an object whose attributes are the parts, such as
            `labkit.spmd.memory.kinds.MemoryParts`. All ways have the same parts, drawn in their order.
        measured: Peaks in bytes for some of the ways; drawn as diamonds.
        caption: The line under the picture.
        what: The axis label: what the bytes are.
        measured_label: The legend for the diamonds.
        limit_bytes: A limit, drawn as a dashed line.

    Returns:
        The picture, 6 inches wide, with the numbers in bytes as its table.

    Raises:
        ValueError: There is nothing to draw, the parts differ, or a measured way has no bar.

    Ranks: controller or local.
    """
    bars = {name: dict(part if isinstance(part, Mapping) else vars(part)) for name, part in parts.items()}
    measured = measured or {}
    _check(bars, measured)
    names = [part for part in next(iter(bars.values())) if any(bar[part] for bar in bars.values())]
    largest = max([sum(bar.values()) for bar in bars.values()] + list(measured.values()) + [limit_bytes or 0])
    scale, unit = scale_for(largest)
    with figure(height_in=_BAR_IN * len(bars) + 1.0) as fig:
        ax = fig.add_subplot()
        _draw(ax, bars, {name: size / scale for name, size in measured.items()}, names, scale, largest / scale)
        for place, name in enumerate(bars):
            if name in measured:
                label = measured_label if name == next(iter(n for n in bars if n in measured)) else None
                ax.plot(measured[name] / scale, place, marker="D", ms=6, mfc="white", mec=INK, mew=1.3, ls="", label=label)
        if limit_bytes is not None:
            ax.axvline(limit_bytes / scale, color=INK, ls="--", lw=1.1, label="limit")
        ax.set_xlabel(f"{what}, {unit}")
        handles, labels = ax.get_legend_handles_labels()
        order = sorted(range(len(labels)), key=lambda place: names.index(labels[place]) if labels[place] in names else len(names))
        shown = [handles[place] for place in order], [labels[place] for place in order]
        columns = len(order) if len(order) <= 5 else -(-len(order) // 2)
        fig.legend(*shown, loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.1)
        return Picture.from_figure(
            fig,
            alt=_alt(bars, measured, limit_bytes),
            caption=caption,
            columns=("way", *names, "together", "measured"),
            rows=[
                (name, *(f"{bar[part]:,}" for part in names), f"{sum(bar.values()):,}", _or_dash(measured.get(name)))
                for name, bar in bars.items()
            ],
        )


def scale_for(largest_bytes: int) -> tuple[int, str]:
    """Return the size of the largest unit that a number of bytes fills, and its name."""
    return next((size, name) for size, name in _UNITS if largest_bytes >= size or size == 1)


def _check(bars: Mapping[str, Mapping[str, int]], measured: Mapping[str, int]) -> None:
    if not bars:
        raise ValueError("there is no bar to draw")
    first = next(iter(bars.values()))
    for name, bar in bars.items():
        if list(bar) != list(first):
            raise ValueError(f"{name} has the parts {list(bar)}, the first bar has {list(first)}")
    if strays := set(measured) - set(bars):
        raise ValueError(f"measured, but without a bar: {sorted(strays)}")


def _draw(
    ax: Axes, bars: Mapping[str, Mapping[str, int]], marks: Mapping[str, float], names: list[str], scale: int, width: float
) -> None:
    others = cycle(_OTHER_LOOKS)
    looks = {part: PART_LOOKS.get(part) or next(others) for part in names}
    for place, (name, bar) in enumerate(bars.items()):
        begin = 0.0
        for part in names:
            color, hatch = looks[part]
            size = bar[part] / scale
            label = part if place == 0 else None
            ax.barh(place, size, 0.62, begin, color=color, hatch=hatch, ec=INK, lw=0.6, label=label)
            middle, room = _free_part(begin, begin + size, marks.get(name), 0.025 * width)
            if room > 0.09 * width:
                # On a hatch, a number needs a plain background.
                ground: dict[str, Any] = {"bbox": {"fc": "white", "ec": "none", "pad": 1.2}} if hatch else {}
                ink = INK if hatch else text_color_on(color)
                ax.text(middle, place, f"{size:.3g}", ha="center", va="center", color=ink, fontsize=7.5, **ground)
            begin += size
    ax.set_yticks(range(len(bars)), list(bars))
    ax.invert_yaxis()
    ax.set_xlim(0, width * 1.04)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=MUTED, alpha=0.25, lw=0.6)
    ax.set_axisbelow(True)


def _free_part(begin: float, end: float, mark: float | None, radius: float) -> tuple[float, float]:
    """Return the middle and the length of the longest stretch that a mark leaves free."""
    if mark is None or not begin - radius < mark < end + radius:
        return (begin + end) / 2, end - begin
    length, low, high = max((high - low, low, high) for low, high in ((begin, mark - radius), (mark + radius, end)))
    return (low + high) / 2, length


def _alt(bars: Mapping[str, Mapping[str, int]], measured: Mapping[str, int], limit_bytes: int | None) -> str:
    told = []
    for name, bar in bars.items():
        largest = max(bar, key=bar.__getitem__)
        peak = f", measured {measured[name]:,}" if name in measured else ""
        told.append(f"{name}: {sum(bar.values()):,} bytes, most of them {largest} ({bar[largest]:,}){peak}")
    limit = "" if limit_bytes is None else f" The limit is {limit_bytes:,} bytes."
    return "Stacked bars. " + "; ".join(told) + "." + limit


def _or_dash(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
