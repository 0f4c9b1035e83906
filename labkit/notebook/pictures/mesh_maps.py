"""Pictures for two-axis layouts: the mesh itself, and matrices with the block of each rank, in memory and on disk.

`shard_map` draws a tensor as a bar and suits cuts along rows. Here a matrix is drawn as a matrix, rows downwards, because two axes
may cut both of its dims.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from labkit.base.plain_text import format_ranks, name_ranks
from labkit.notebook.drawing.boxes import canvas
from labkit.notebook.drawing.hover import mark, with_hover
from labkit.notebook.drawing.style import FAINT, INK, MUTED, WIDTH_IN, Picture, figure, rank_style, text_color_on
from labkit.notebook.pictures.shard_maps import ShardBox, boxes_of, rows_by_tensor, span
from labkit.spmd.shards.layouts import Split, splits_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labkit.spmd.shards.layouts import MeshRecord
    from labkit.spmd.shards.records import Chunk, ShardRecord

MAX_PANELS = 4
MAX_MESH_RANKS = 64

_CHAR_IN = 0.066
_PANEL_IN = 1.55
_HEAD_IN = 0.56
_GAP_IN = 0.42
_MESH_CAPTION = (
    "The mesh: each box is a rank at its place. Ranks in a row form one {across} group, ranks in a column one {down} group."
)
_BLOCK_CAPTION = (
    "Each panel is one matrix, rows from top to bottom and columns from left to right, at the indices where blocks begin. Colours "
    "and numbers are ranks. Grey with a dashed edge: several ranks hold a copy of the same block."
)


class DiskChunk(NamedTuple):
    """A piece of a tensor in a checkpoint.

    Attributes:
        chunk: The part of the tensor that it covers.
        file: Name of the file that holds it, such as ``__2_0.distcp``; the first number is the rank that wrote it.
    """

    chunk: Chunk
    file: str


def mesh_picture(mesh: MeshRecord, *, caption: str = "") -> Picture:
    """Draw a mesh of one or two axes: the ranks in a grid, the first axis downwards, the second to the right.

    Args:
        mesh: From `labkit.spmd.shards.meshes.mesh_record`.
        caption: The line under the picture.

    Raises:
        ValueError: The mesh has more than two axes, or more than `MAX_MESH_RANKS` ranks.

    Ranks: controller.
    """
    if len(mesh.shape) > 2 or len(mesh.ranks) > MAX_MESH_RANKS:
        raise ValueError(f"a mesh of {len(mesh.shape)} axes with {len(mesh.ranks)} ranks cannot be drawn as a readable grid")
    axes_names = mesh.axes if len(mesh.axes) == 2 else ("", *mesh.axes)
    num_rows, num_columns = mesh.shape if len(mesh.shape) == 2 else (1, *mesh.shape)
    wide = min(1.1, (WIDTH_IN - 1.6) / num_columns)
    with figure(height_in=0.75 + 0.52 * num_rows) as fig:
        ax = canvas(fig)
        left, top = 1.3, 0.62
        for index, rank in enumerate(mesh.ranks):
            row, column = divmod(index, num_columns)
            _draw_rank(ax, rank, mesh.coordinate(rank), left + column * wide, top + row * 0.52, wide)
        _draw_axis_names(ax, axes_names, (num_rows, num_columns), left, top, wide)
        caption = caption or _MESH_CAPTION.format(across=axes_names[1] or "second-axis", down=axes_names[0] or "first-axis")
        if len(mesh.axes) == 1:
            caption = "The mesh: each box is a rank at its place on the only axis."
        head = ("rank", *(name or f"axis {index}" for index, name in enumerate(mesh.axes)))
        rows = [(rank, *mesh.coordinate(rank)) for rank in mesh.ranks]
        return Picture.from_figure(fig, alt=_mesh_alt(mesh), caption=caption, columns=head, rows=rows)


def block_map(
    tables: Mapping[int, Sequence[ShardRecord]],
    *,
    names: Sequence[str],
    disk: Mapping[str, Sequence[DiskChunk]] | None = None,
    titles: Mapping[str, str] | None = None,
    caption: str = "",
) -> Picture:
    """Draw matrices with the block that each rank holds, and below each matrix the chunks of its checkpoint.

    Args:
        tables: Per rank, the records of `labkit.spmd.shard_table`.
        names: The matrices to draw, up to `MAX_PANELS`, as names or shell patterns.
        disk: Per tensor, the chunks of a checkpoint; a second row of panels shows them.
        titles: Headings for tensors whose names are too long or say too little.
        caption: The line under the picture.

    Returns:
        The picture, with a table of every block; chunks on disk have no placements there.

    Raises:
        ValueError: No tensor matches, too many match, one has more than two dims, or ``disk`` lacks one.

    Ranks: controller.
    """
    tensors = rows_by_tensor(tables, names)
    if len(tensors) > MAX_PANELS:
        raise ValueError(f"{len(tensors)} matrices do not fit side by side; choose up to {MAX_PANELS}")
    shapes = {name: next(iter(by_rank.values())).shape for name, by_rank in tensors.items()}
    if deep := [name for name, shape in shapes.items() if not 1 <= len(shape) <= 2]:
        raise ValueError(f"{', '.join(deep)} cannot be drawn as a matrix")
    if missing := [name for name in tensors if disk is not None and name not in disk]:
        raise ValueError(f"the checkpoint's chunks of {', '.join(missing)} are missing")
    live = {name: boxes_of(by_rank) for name, by_rank in tensors.items()}
    lines = [("live" if disk else "", live)]
    if disk is not None:
        lines.append(("on disk", {name: _disk_boxes(disk[name], shapes[name]) for name in tensors}))
    with figure(height_in=_HEAD_IN + len(lines) * (_PANEL_IN + _GAP_IN) - 0.12) as fig:
        ax = canvas(fig)
        for index, name in enumerate(tensors):
            left, wide = _panel_span(index, len(tensors))
            cuts = _cuts(next(iter(tensors[name].values())))
            _draw_title(ax, (titles or {}).get(name, name), shapes[name], cuts, left, wide)
            for line, (what, boxes) in enumerate(lines):
                top = _HEAD_IN + line * (_PANEL_IN + _GAP_IN) + 0.08
                _draw_matrix(ax, name, boxes[name], shapes[name], (left, top, wide))
                if index == 0 and what:
                    ax.text(0.12, top + _PANEL_IN / 2, what, rotation=90, ha="center", va="center", weight="bold", fontsize=8)
        head = ("where", "tensor", "placements", "rows", "columns", "ranks")
        picture = Picture.from_figure(
            fig, alt=_block_alt(lines), caption=caption or _BLOCK_CAPTION, columns=head, rows=_block_rows(lines, tensors)
        )
        return with_hover(fig, picture)


def _draw_rank(ax: Axes, rank: int, place: tuple[int, ...], x: float, y: float, wide: float) -> None:
    from matplotlib.patches import Rectangle

    style = rank_style(rank)
    ax.add_patch(Rectangle((x + 0.03, y), wide - 0.06, 0.46, fc=style.color, ec=INK, lw=0.8))
    label = f"rank {rank}" if wide > 0.6 else str(rank)
    ax.text(x + wide / 2, y + 0.16, label, ha="center", va="center", color=style.text_color, fontsize=8.5, weight="bold")
    text = f"({', '.join(map(str, place))})"
    if len(text) * 0.06 < wide:
        ax.text(x + wide / 2, y + 0.34, text, ha="center", va="center", color=style.text_color, fontsize=7)


def _draw_axis_names(ax: Axes, names: Sequence[str], shape: tuple[int, int], left: float, top: float, wide: float) -> None:
    arrow = {"arrowstyle": "-|>", "color": INK, "lw": 1.1}
    right, bottom = left + shape[1] * wide - 0.03, top + shape[0] * 0.52 - 0.06
    if names[1]:
        ax.annotate("", (max(right, left + 0.8), top - 0.12), (left + 0.03, top - 0.12), arrowprops=arrow)
        ax.text(left + 0.03, top - 0.3, f"axis 1: {names[1]}", va="center", weight="bold")
    if names[0]:
        ax.annotate("", (left - 0.12, bottom), (left - 0.12, top), arrowprops=arrow)
        ax.text(left - 0.25, (top + bottom) / 2, f"axis 0: {names[0]}", ha="right", va="center", weight="bold")


def _panel_span(index: int, num: int) -> tuple[float, float]:
    """Return the left edge and width of a matrix, in inches; the row indices are to its left."""
    slot = (WIDTH_IN - 0.2) / max(num, 2)
    return 0.2 + index * slot + 0.38, min(slot - 0.5, 2.2)


def _draw_title(ax: Axes, title: str, shape: Sequence[int], cuts: Sequence[str], left: float, wide: float) -> None:
    limit = int(wide / 0.062)
    shown = title if len(title) <= limit else "..." + title[-(limit - 3) :]
    ax.text(left, 0.1, shown, va="center", fontsize=7.5, weight="bold")
    ax.text(left, 0.25, " x ".join(map(str, shape)), va="center", fontsize=7, color=MUTED)
    for line, cut in enumerate(cuts):
        ax.text(left, 0.38 + 0.12 * line, cut, va="center", fontsize=6.5, color=MUTED)


def _cuts(record: ShardRecord) -> list[str]:
    """Return the effect of each mesh axis, in words that fit under a title."""
    if not record.is_distributed:
        return ["plain: each rank has its own"]
    names = [name or f"axis {index}" for index, name in enumerate(record.mesh_axes)]
    return [f"{name}: {_cut(split)}" for name, split in zip(names, splits_of(record.placements), strict=True)]


def _cut(split: Split) -> str:
    if split.dim is None:
        return "copies"
    return ("rows", "columns")[split.dim] + (" (strided)" if split.strided else "")


def _draw_matrix(ax: Axes, name: str, boxes: Sequence[ShardBox], shape: Sequence[int], place: tuple[float, float, float]) -> None:
    from matplotlib.patches import Rectangle

    left, top, wide = place
    for box in boxes:
        y, tall = top + box.left * _PANEL_IN, box.width * _PANEL_IN
        x, broad = left + box.top * wide, box.height * wide
        shared = len(box.ranks) > 1
        style = rank_style(box.ranks[0])
        color = FAINT if shared else style.color
        edge = {"ec": MUTED, "ls": (0, (3, 2))} if shared else {"ec": "white", "ls": "solid"}
        patch = Rectangle((x, y), broad, tall, fc=color, lw=0.9, **edge)
        ax.add_patch(patch)
        who = name_ranks(box.ranks)
        mark(patch, f"{name}\n{who}: rows {span(box.chunk, 0)}, columns {span(box.chunk, 1)}, {box.chunk.numel:,} elements")
        if label := _label(box.ranks, broad, tall):
            ink = INK if shared else text_color_on(color)
            ax.text(x + broad / 2, y + tall / 2, label, ha="center", va="center", fontsize=7, color=ink)
    _draw_indices(ax, boxes, shape, place)


def _label(ranks: Sequence[int], broad: float, tall: float) -> str:
    who = format_ranks(ranks)
    texts = (f"rank {who}" if len(ranks) == 1 else f"ranks {who}", who)
    return next((text for text in texts if len(text) * _CHAR_IN < broad and tall > 0.11), "")


def _draw_indices(ax: Axes, boxes: Sequence[ShardBox], shape: Sequence[int], place: tuple[float, float, float]) -> None:
    """Write the index where each block begins, and the size at the end. Leave out an index that would overlap the previous one."""
    left, top, wide = place
    for dim, length in ((0, _PANEL_IN), (1, wide)):
        if dim >= len(shape):
            continue
        starts = sorted({box.chunk.offsets[dim] for box in boxes if dim < len(box.chunk.offsets)} | {shape[dim]})
        last = -1.0
        for start in starts:
            at = start / shape[dim] * length if shape[dim] else 0.0
            if at - last < (0.1 if dim == 0 else 0.22):
                continue
            last = at
            where = (left - 0.05, top + at) if dim == 0 else (left + at, top + _PANEL_IN + 0.09)
            ax.text(*where, str(start), ha="right" if dim == 0 else "center", va="center", fontsize=6.5, color=INK)


def _disk_boxes(chunks: Sequence[DiskChunk], shape: Sequence[int]) -> list[ShardBox]:
    found = []
    for chunk, file in chunks:
        digits = re.search(r"\d+", file)
        if digits is None:
            raise ValueError(f"the file name {file} does not say which rank wrote it")
        spans = [
            (chunk.offsets[dim] / shape[dim], chunk.sizes[dim] / shape[dim]) if dim < len(shape) and shape[dim] else (0.0, 1.0)
            for dim in (0, 1)
        ]
        (first, rows), (second, columns) = spans
        found.append(ShardBox((int(digits[0]),), chunk, first, second, rows, columns))
    return found


_Lines = Sequence[tuple[str, Mapping[str, Sequence[ShardBox]]]]


def _block_rows(lines: _Lines, tensors: Mapping[str, Mapping[int, ShardRecord]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for what, by_name in lines:
        for name, boxes in by_name.items():
            # A chunk has offsets and sizes; only a tensor in memory has placements.
            placements = "" if what == "on disk" else ", ".join(next(iter(tensors[name].values())).placements) or "plain"
            for box in sorted(boxes, key=lambda box: box.chunk.offsets):
                columns = span(box.chunk, 1)
                rows.append((what or "live", name, placements, span(box.chunk, 0), columns, format_ranks(box.ranks)))
    return rows


def _mesh_alt(mesh: MeshRecord) -> str:
    sizes = " by ".join(f"{size} ({name or 'no name'})" for name, size in zip(mesh.axes, mesh.shape, strict=True))
    rows = "; ".join(
        ", ".join(map(str, mesh.ranks[start : start + mesh.shape[-1]])) for start in range(0, len(mesh.ranks), mesh.shape[-1])
    )
    return f"A mesh of {sizes} ranks. Row by row: {rows}."


def _block_alt(lines: _Lines) -> str:
    words = []
    for what, by_name in lines:
        for name, boxes in by_name.items():
            ordered = sorted(boxes, key=lambda box: box.chunk.offsets)
            order = ", ".join(format_ranks(box.ranks) for box in ordered[:16])
            words.append(f"{name}{' ' + what if what else ''}: {len(boxes)} blocks, of ranks {order}")
    return "Blocks from the top left, row by row. " + "; ".join(words) + "."
