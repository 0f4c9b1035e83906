"""A picture of plans: bytes on a rank by kind against a device's memory, and bytes sent in a step, inside and between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labkit.notebook.drawing.style import INK, MUTED, Picture, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labkit.plan.records import Plan

# As in labkit.notebook.pictures.bars, which shows the same kinds in the labs.
_KINDS = {
    "parameters": ("#0072B2", ""),
    "gradients": ("#56B4E9", "///"),
    "optimizer": ("#999999", ""),
    "activations": ("#E69F00", "\\\\\\"),
}
_INSIDE, _BETWEEN = ("#009E73", ""), ("#D55E00", "xxx")
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
_BAR_IN = 0.4
_FAR = 3


def draw_plans(plans: Mapping[str, Plan], *, caption: str, limit_bytes: int | None = None) -> Picture:
    """Draw one or several plans above each other, so that meshes can be compared.

    Left: bytes on the fullest rank, and on the emptiest if it holds less, stacked by kind. Right: bytes that all ranks together
    send in a step.

    Args:
        plans: Plans by the name under which they are drawn.
        caption: The line under the picture.
        limit_bytes: The memory of a device: drawn as a dashed line, or only named if it is far beyond the bars.

    Returns:
        The picture, 6 inches wide, with the numbers in bytes as its table.

    Raises:
        ValueError: There is no plan.

    Ranks: controller or local.
    """
    if not plans:
        raise ValueError("there is no plan to draw")
    memory = {label: parts for name, plan in plans.items() for label, parts in _bars(name, plan).items()}
    sent = {name: (plan.inside_bytes, plan.between_bytes) for name, plan in plans.items()}
    with figure(height_in=_BAR_IN * len(memory) + 1.25) as fig:
        left, right = fig.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
        _draw_memory(left, memory, limit_bytes)
        _draw_sent(right, [sent.get(label) for label in memory])
        left.invert_yaxis()
        for ax in (left, right):
            ax.tick_params(axis="y", length=0)
            ax.grid(axis="x", color=MUTED, alpha=0.25, lw=0.6)
            ax.set_axisbelow(True)
        fig.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=3, handlelength=1.5, columnspacing=0.9)
        fig.legend(*right.get_legend_handles_labels(), loc="outside upper right", ncols=1, handlelength=1.5)
        return Picture.from_figure(
            fig,
            alt=_alt(memory, sent, limit_bytes),
            caption=caption,
            columns=("plan", *_KINDS, "together", "inside nodes", "between nodes"),
            rows=[
                (label, *(f"{size:,}" for size in parts.values()), f"{sum(parts.values()):,}", *_sent_cells(label, sent))
                for label, parts in memory.items()
            ],
        )


def _bars(name: str, plan: Plan) -> dict[str, dict[str, int]]:
    """Return the bytes by kind of the fullest rank, and of the emptiest if it holds less."""
    ranks = [plan.ranks[0]]
    least = min(plan.ranks, key=lambda each: each.num_elements)
    if least.num_elements < ranks[0].num_elements:
        ranks.append(least)
    labels = [name, f"{name}, rank {least.rank}"]
    return {label: {kind: getattr(each.memory, kind) for kind in _KINDS} for label, each in zip(labels, ranks, strict=False)}


def _sent_cells(label: str, sent: Mapping[str, tuple[int, int]]) -> tuple[str, str]:
    inside, between = sent.get(label, (-1, -1))
    return ("", "") if inside < 0 else (f"{inside:,}", f"{between:,}")


def _draw_memory(ax: Axes, bars: Mapping[str, Mapping[str, int]], limit_bytes: int | None) -> None:
    largest = max(sum(parts.values()) for parts in bars.values())
    scale, unit = _unit(largest)
    for place, parts in enumerate(bars.values()):
        begin = 0.0
        for kind, size in parts.items():
            color, hatch = _KINDS[kind]
            label = kind if place == 0 else None
            ax.barh(place, size / scale, 0.62, begin, color=color, hatch=hatch, ec=INK, lw=0.6, label=label)
            begin += size / scale
        _label_end(ax, place, begin, f"{begin:.3g}")
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set_xlabel(f"on one rank, {unit}")
    # A limit far beyond the bars is named and not drawn: the bars would be too short to be readable.
    if limit_bytes is not None and limit_bytes <= _FAR * largest:
        ax.axvline(limit_bytes / scale, color=INK, ls="--", lw=1.1, label="device")
        largest = max(largest, limit_bytes)
    elif limit_bytes is not None:
        ax.set_xlabel(f"on one rank, {unit}; a device has {limit_bytes / scale:,.0f}")
    ax.set_xlim(0, max(largest / scale, 1e-9) * 1.2)


def _draw_sent(ax: Axes, rows: Sequence[tuple[int, int] | None]) -> None:
    """Draw a bar beside the first row of each plan and none beside its other rows."""
    largest = max(sum(pair) for pair in rows if pair)
    scale, unit = _unit(largest)
    for place, pair in enumerate(rows):
        if pair is None:
            continue
        begin = 0.0
        for what, (color, hatch), size in zip(("inside nodes", "between"), (_INSIDE, _BETWEEN), pair, strict=True):
            label = what if place == 0 else None
            ax.barh(place, size / scale, 0.62, begin, color=color, hatch=hatch, ec=INK, lw=0.6, label=label)
            begin += size / scale
        _label_end(ax, place, begin, f"{pair[1] / scale:.3g} between")
    ax.set_xlim(0, max(largest / scale, 1e-9) * 1.5)
    ax.set_xlabel(f"sent in a step by all ranks, {unit}")


def _label_end(ax: Axes, place: int, end: float, text: str) -> None:
    ax.annotate(
        text,
        (end, place),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
    )


def _unit(largest: int) -> tuple[int, str]:
    return next((size, name) for size, name in _UNITS if largest >= size or size == 1)


def _alt(bars: Mapping[str, Mapping[str, int]], sent: Mapping[str, tuple[int, int]], limit_bytes: int | None) -> str:
    told = [
        f"{label}: {sum(parts.values()):,} bytes on the rank, most of them {max(parts, key=parts.__getitem__)}"
        for label, parts in bars.items()
    ]
    moved = [f"{name}: {inside:,} bytes inside nodes and {between:,} between nodes" for name, (inside, between) in sent.items()]
    limit = "" if limit_bytes is None else f" The device has {limit_bytes:,} bytes."
    return f"Stacked bars of memory. {'; '.join(told)}.{limit} Bars of what a step sends. {'; '.join(moved)}."
