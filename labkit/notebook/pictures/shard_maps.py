"""A map of shards: which rank holds which rows and columns of which tensor, drawn from the ranks' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from labkit.base.plain_text import format_ranks
from labkit.notebook.drawing.hover import mark, with_hover
from labkit.notebook.drawing.style import FAINT, INK, MUTED, WIDTH_IN, Picture, figure, rank_style, text_color_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from labkit.spmd.shards.records import Chunk, ShardRecord

MAX_TENSORS = 32

_LABEL_IN = 2.45
_BAR_IN = WIDTH_IN - _LABEL_IN - 0.35
_CHAR_IN = 0.063
_ROW_IN = 0.24
_BLOCK_ROW_IN = 0.5
_CAPTION = (
    "Each bar is one tensor: dim 0 from left to right, dim 1 from top to bottom. Colours and numbers are ranks, with the "
    "indices of dim 0 that they hold. A dashed bar is a plain tensor: every rank has its own."
)


@dataclass(frozen=True)
class ShardBox:
    """A part of a tensor and the ranks that hold it, as fractions of the bar."""

    ranks: tuple[int, ...]
    chunk: Chunk
    left: float
    top: float
    width: float
    height: float


def shard_map(
    tables: Mapping[int, Sequence[ShardRecord]], *, names: Sequence[str] = ("*",), caption: str = _CAPTION, title: str = ""
) -> Picture:
    """Draw which rank holds which part of each tensor.

    Args:
        tables: Per rank, the records of `labkit.spmd.shard_table`: the result of ``pool.run(shard_table, model)`` or of a ``%%spmd
            --out`` cell.
        names: The tensors to draw, as names or shell patterns such as ``layers.0.*``; all by default.
        caption: The line under the picture.
        title: A heading inside it.

    Returns:
        The picture, with a table of every chunk.

    Raises:
        ValueError: No tensor matches, more than `MAX_TENSORS` match, or the ranks report different tensors.

    Ranks: controller.
    """
    rows = rows_by_tensor(tables, names)
    boxes = {name: boxes_of(by_rank) for name, by_rank in rows.items()}
    heights = [_BLOCK_ROW_IN if any(box.height < 1 for box in boxes[name]) else _ROW_IN for name in rows]
    with figure(height_in=sum(heights) + 0.5 + (0.2 if title else 0.0)) as fig:
        axes = fig.subplots()
        _style_axes(axes, sum(heights), title)
        below = sum(heights)
        for (name, by_rank), height in zip(rows.items(), heights, strict=True):
            below -= height
            _draw_tensor(axes, by_rank, boxes[name], below, height)
        head = ("tensor", "shape", "dtype", "placements", "rank", "holds", "bytes")
        return with_hover(fig, Picture.from_figure(fig, alt=_alt(rows), caption=caption, columns=head, rows=_table(rows)))


def rows_by_tensor(tables: Mapping[int, Sequence[ShardRecord]], names: Sequence[str]) -> dict[str, dict[int, ShardRecord]]:
    """Return the records of the tensors that match, by name and rank.

    Raises:
        ValueError: See `shard_map`.
    """
    by_name: dict[str, dict[int, ShardRecord]] = {}
    for rank, records in sorted(tables.items()):
        for record in records:
            if any(fnmatchcase(record.name, pattern) for pattern in names):
                by_name.setdefault(record.name, {})[rank] = record
    if not by_name:
        raise ValueError(f"no tensor matches {list(names)}")
    if len(by_name) > MAX_TENSORS:
        raise ValueError(f"{len(by_name)} tensors are too many to be read in one picture; choose up to {MAX_TENSORS} with `names`")
    for name, by_rank in by_name.items():
        if by_rank.keys() != tables.keys():
            raise ValueError(f"{name} is reported by ranks {format_ranks(by_rank)} of {format_ranks(tables)} only")
    return by_name


def boxes_of(by_rank: Mapping[int, ShardRecord]) -> list[ShardBox]:
    """Return the parts of one tensor, each once with all ranks that hold it."""
    holders: dict[Chunk, list[int]] = {}
    for rank, record in by_rank.items():
        for chunk in record.chunks:
            holders.setdefault(chunk, []).append(rank)
    shape = next(iter(by_rank.values())).shape
    found = []
    for chunk, ranks in holders.items():
        (left, width), (top, height) = (_fraction(chunk, shape, dim) for dim in (0, 1))
        found.append(ShardBox(tuple(ranks), chunk, left, top, width, height))
    return found


def _fraction(chunk: Chunk, shape: tuple[int, ...], dim: int) -> tuple[float, float]:
    if dim >= len(shape) or shape[dim] == 0:
        return 0.0, 1.0
    return chunk.offsets[dim] / shape[dim], chunk.sizes[dim] / shape[dim]


def _style_axes(axes: Axes, height: float, title: str) -> None:
    axes.set_xlim(-_LABEL_IN / _BAR_IN, 1.0)
    axes.set_ylim(0.0, height)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_bounds(0.0, 1.0)
    axes.set_xlabel("position in dim 0 (% of its size)", x=(_LABEL_IN + _BAR_IN / 2) / (_LABEL_IN + _BAR_IN))
    if title:
        axes.set_title(title)


def _draw_tensor(axes: Axes, by_rank: Mapping[int, ShardRecord], boxes: Sequence[ShardBox], below: float, height: float) -> None:
    record = next(iter(by_rank.values()))
    pad = 0.035
    bottom, tall = below + pad, height - 2 * pad
    middle = below + height / 2
    shape = " x ".join(map(str, record.shape)) or "scalar"
    axes.text(-0.02, middle, f"{_shortened(record.name)}  {shape}", ha="right", va="center", fontsize=7)
    if record.tied_to:
        axes.text(0.01, middle, f"the same tensor as {record.tied_to}", ha="left", va="center", fontsize=7, color=MUTED)
        return
    # Use one wording per row: the longest that fits into its narrowest box.
    wording = max((_wording(box, record, len(by_rank)) for box in boxes), default=0)
    for box in boxes:
        # Use the record of a rank that holds the box: uneven shards differ in bytes.
        _draw_box(axes, box, by_rank[box.ranks[0]], len(by_rank), wording, bottom, tall)
    empty = [rank for rank, held in by_rank.items() if not held.chunks]
    if empty:
        axes.text(1.005, middle, f"none: {format_ranks(empty)}", ha="left", va="center", fontsize=6, color=MUTED, clip_on=False)


def _wording(box: ShardBox, record: ShardRecord, num_ranks: int) -> int:
    fits = (len(text) * _CHAR_IN <= box.width * _BAR_IN for text in _labels(box, record, num_ranks))
    return next(index for index, fitting in enumerate(fits) if fitting)


def _draw_box(axes: Axes, box: ShardBox, record: ShardRecord, num_ranks: int, wording: int, bottom: float, tall: float) -> None:
    from matplotlib.patches import Rectangle

    shared = _is_shared(box, num_ranks)
    color = FAINT if shared or not record.is_distributed else rank_style(box.ranks[0]).color
    y = bottom + tall * (1 - box.top - box.height)
    dashed = not record.is_distributed
    patch = Rectangle(
        (box.left, y),
        box.width,
        tall * box.height,
        facecolor=color,
        edgecolor=MUTED if dashed else "white",
        linewidth=0.8,
        linestyle=(0, (3, 2)) if dashed else "solid",
    )
    axes.add_patch(patch)
    mark(patch, _words(box, record))
    label = _labels(box, record, num_ranks)[wording]
    center = (box.left + box.width / 2, y + tall * box.height / 2)
    ink = INK if color == FAINT else text_color_on(color)
    axes.text(*center, label, ha="center", va="center_baseline", fontsize=7, color=ink)


def _words(box: ShardBox, record: ShardRecord) -> str:
    """Return the text shown when the pointer is on a box."""
    held = " x ".join(span(box.chunk, dim) for dim in range(len(box.chunk.offsets))) or "all"
    total = sum(chunk.numel for chunk in record.chunks)
    size_bytes = record.local_bytes * box.chunk.numel // total if total else 0
    who = f"rank {format_ranks(box.ranks)}" if len(box.ranks) == 1 else f"ranks {format_ranks(box.ranks)}, each"
    shape = " x ".join(map(str, record.shape)) or "scalar"
    placements = ", ".join(record.placements) or "plain"
    return f"{record.name}\n{shape}, {record.dtype}, {placements}\n{who}: {held}, {size_bytes:,} bytes"


def _is_shared(box: ShardBox, num_ranks: int) -> bool:
    return len(box.ranks) == num_ranks > 1


def _labels(box: ShardBox, record: ShardRecord, num_ranks: int) -> list[str]:
    """Return the four possible labels of a box, from the longest to an empty one."""
    ranks = format_ranks(box.ranks)
    who = f"rank {ranks}" if len(box.ranks) == 1 else f"ranks {ranks}"
    if not record.is_distributed:
        return [f"plain, {who} each its own" if len(box.ranks) > 1 else f"plain, {who}", f"plain: {ranks}", ranks, ""]
    if _is_shared(box, num_ranks):
        return [f"a copy on each of {who}", who, ranks, ""]
    held = span(box.chunk, 0)
    return [f"{who}: {held}", f"{ranks}: {held}", ranks, ""]


def span(chunk: Chunk, dim: int) -> str:
    """Return the indices of a chunk in one dim, such as ``8-15``."""
    if dim >= len(chunk.offsets):
        return "all"
    first, size = chunk.offsets[dim], chunk.sizes[dim]
    return f"{first}" if size == 1 else f"{first}-{first + size - 1}"


def _shortened(name: str, limit: int = 32) -> str:
    return name if len(name) <= limit else "..." + name[-(limit - 3) :]


def _table(rows: Mapping[str, Mapping[int, ShardRecord]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for name, by_rank in rows.items():
        for rank, record in by_rank.items():
            shape = " x ".join(map(str, record.shape)) or "scalar"
            placements = ", ".join(record.placements) or "plain"
            if record.tied_to:
                held, size = f"as {record.tied_to}", "0"
            else:
                held, size = _held(record), f"{record.local_bytes:,}"
            lines.append((name, shape, record.dtype, placements, str(rank), held, size))
    return lines


def _held(record: ShardRecord) -> str:
    boxes = [" x ".join(span(chunk, dim) for dim in range(len(chunk.offsets))) or "all" for chunk in record.chunks]
    return "; ".join(boxes) or "nothing"


def _alt(rows: Mapping[str, Mapping[int, ShardRecord]]) -> str:
    per_rank: dict[int, int] = {}
    for by_rank in rows.values():
        for rank, record in by_rank.items():
            per_rank[rank] = per_rank.get(rank, 0) + (0 if record.tied_to else record.local_bytes)
    sizes = ", ".join(f"rank {rank} {size:,} bytes" for rank, size in per_rank.items())
    sharded = sum(any(_is_split(record) for record in by_rank.values()) for by_rank in rows.values())
    return f"Map of {len(rows)} tensors, {sharded} of them split over the ranks. Held: {sizes}."


def _is_split(record: ShardRecord) -> bool:
    return record.is_distributed and sum(chunk.numel for chunk in record.chunks) < _numel(record.shape)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
