"""A map of one block's elements: FSDP1 cuts one flat parameter into equal pieces, FSDP2 cuts each parameter by its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from labkit.notebook.drawing.style import INK, MUTED, WIDTH_IN, Picture, figure, rank_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labkit.spmd.shards.records import FlatShare, ShardRecord

_LEFT_IN, _RIGHT_IN, _BAR_IN = 0.62, 0.1, 0.34
_CHAR_IN = 0.07
_CAPTION = (
    "The same block twice, with its elements from left to right. Above: FSDP1's flat parameter, cut into one equal piece per rank "
    "without regard to the parameters in it. Below: FSDP2 cuts each parameter by its rows. Colours and numbers are ranks."
)
Part = tuple[int, int]  # a rank and how many elements it holds


def flat_map(
    shares: Mapping[int, Sequence[FlatShare]], tables: Mapping[int, Sequence[ShardRecord]], *, unit: str, caption: str = _CAPTION
) -> Picture:
    """Draw one block's elements twice, coloured by the rank that holds them.

    Args:
        shares: Per rank, the result of `labkit.spmd.shards.flat_parameters.flat_shares` for the FSDP1 model.
        tables: Per rank, the result of `labkit.spmd.shard_table` for the same model under FSDP2.
        unit: The FQN of the block, such as ``layers.0``.
        caption: The line under the picture.

    Returns:
        The picture, with a table of both.

    Raises:
        ValueError: No rank reports a parameter of this unit, or the two models do not hold the same number of elements.

    Ranks: controller.
    """
    old = {share.name: _flat_parts(shares, share.name) for share in next(iter(shares.values())) if share.unit == unit}
    new = {record.name: _rows_parts(tables, record.name) for record in next(iter(tables.values())) if record.name in old}
    sizes = {name: sum(numel for _, numel in parts) for name, parts in old.items()}
    if not sizes:
        raise ValueError(f"no parameter of FSDP1 unit {unit!r}; units: {sorted({s.unit for s in next(iter(shares.values()))})}")
    if sizes != {name: sum(numel for _, numel in parts) for name, parts in new.items()}:
        raise ValueError("the two models do not hold the same parameters with the same number of elements")
    short = {name: name.removeprefix(f"{unit}.").removesuffix(".weight").rpartition(".")[2] for name in sizes}
    with figure(height_in=1.75) as fig:
        fig.set_layout_engine("none")
        axes = fig.add_axes((_LEFT_IN / WIDTH_IN, 0.0, 1 - (_LEFT_IN + _RIGHT_IN) / WIDTH_IN, 1.0))
        axes.axis("off")
        axes.set_xlim(0, sum(sizes.values()))
        axes.set_ylim(0, 1.75)
        _draw_row(axes, "FSDP1", 1.0, old, sizes, merged=True)
        _draw_row(axes, "FSDP2", 0.2, new, sizes, merged=False)
        _draw_names(axes, sizes, short, 1.4, 0.2 + _BAR_IN)
        rows = [(short[name], sizes[name], _words(old[name]), _words(new[name])) for name in sizes]
        return Picture.from_figure(
            fig, alt=_alt(old, new), caption=caption, columns=("parameter", "elements", "FSDP1", "FSDP2"), rows=rows
        )


def _flat_parts(shares: Mapping[int, Sequence[FlatShare]], name: str) -> list[Part]:
    return [
        (rank, share.numel) for rank, listed in sorted(shares.items()) for share in listed if share.name == name and share.numel
    ]


def _rows_parts(tables: Mapping[int, Sequence[ShardRecord]], name: str) -> list[Part]:
    held = [(rank, record) for rank, records in sorted(tables.items()) for record in records if record.name == name]
    return [(rank, prod(chunk.sizes)) for rank, record in held for chunk in record.chunks if chunk.numel]


def _draw_row(
    axes: Axes, label: str, bottom: float, parts_of: Mapping[str, list[Part]], sizes: Mapping[str, int], *, merged: bool
) -> None:
    from matplotlib.patches import Rectangle

    axes.text(-0.01 * sum(sizes.values()), bottom + _BAR_IN / 2, label, ha="right", va="center", weight="bold")
    spans: list[tuple[int, float, float]] = []
    at = 0
    for parts in parts_of.values():
        for rank, numel in parts:
            if merged and spans and spans[-1][0] == rank:
                spans[-1] = (rank, spans[-1][1], at + numel)
            else:
                spans.append((rank, at, at + numel))
            at += numel
    scale = (WIDTH_IN - _LEFT_IN - _RIGHT_IN) / sum(sizes.values())
    for rank, start, stop in spans:
        style = rank_style(rank)
        axes.add_patch(Rectangle((start, bottom), stop - start, _BAR_IN, fc=style.color, ec="white", lw=0.3, hatch=style.hatch))
        if (stop - start) * scale > 1.3 * _CHAR_IN:
            box = {"fc": style.color, "ec": "none", "pad": 0.6}
            middle = ((start + stop) / 2, bottom + _BAR_IN / 2)
            axes.text(*middle, str(rank), ha="center", va="center", color=style.text_color, fontsize=8, bbox=box)


def _draw_names(axes: Axes, sizes: Mapping[str, int], short: Mapping[str, str], top: float, low: float) -> None:
    """Draw names between the bars, and a line through both bars at the ends of each parameter."""
    scale = (WIDTH_IN - _LEFT_IN - _RIGHT_IN) / sum(sizes.values())
    at = 0
    for name, numel in sizes.items():
        for edge in (at, at + numel):
            axes.plot([edge, edge], [low - _BAR_IN - 0.06, top], color=INK, lw=0.7, zorder=3)
        if numel * scale > len(short[name]) * _CHAR_IN:
            axes.text(at + numel / 2, (1.0 + low) / 2, short[name], ha="center", va="center", fontsize=8)
        at += numel
    axes.text(0, top + 0.05, "one flat parameter", color=MUTED, fontsize=7.5, va="bottom")
    thin = [short[name] for name, numel in sizes.items() if numel * scale <= len(short[name]) * _CHAR_IN]
    axes.text(0, 0.0, f"thin lines: {', '.join(thin)}" if thin else "", color=MUTED, fontsize=7, va="bottom")


def _words(parts: Sequence[Part]) -> str:
    return ", ".join(f"rank {rank}: {numel}" for rank, numel in parts)


def _alt(old: Mapping[str, list[Part]], new: Mapping[str, list[Part]]) -> str:
    cut_old = sum(len(parts) > 1 for parts in old.values())
    cut_new = sum(len(parts) > 1 for parts in new.values())
    return (
        f"Two bars for the {len(old)} parameters of one block. Under FSDP1 the bar is cut into one equal piece per rank; "
        f"{_lie(cut_old)}. Under FSDP2 each parameter is cut by itself; {_lie(cut_new)}."
    )


def _lie(num_cut: int) -> str:
    return f"{num_cut} parameter{'s lie' if num_cut != 1 else ' lies'} on several ranks"
