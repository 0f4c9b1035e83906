"""The contents of a checkpoint as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from labkit.base.plain_text import format_ranks, printable
from labkit.checkpoint.formats.catalog import open_checkpoint
from labkit.checkpoint.formats.dcp_versions import is_new
from labkit.checkpoint.index.held import also_in, missing_files
from labkit.checkpoint.index.model import Checkpoint, Chunk, TensorEntry
from labkit.checkpoint.index.sections import wrappers_of
from labkit.checkpoint.views.describe import SECTIONS, dtype_text, matches, select, ties, totals
from labkit.checkpoint.views.small_values import SmallValue, small_values
from labkit.checkpoint.wording import bytes_text, counted

KINDS = {
    "dcp": "DCP directory",
    "torch": "torch.save",
    "torch_ranks": "torch.save, one file per rank",
    "safetensors": "safetensors",
    "parts": "put together from parts",
}
DEFAULT_ROWS = 200
_MISSING = 8  # enough to see the problem


def render(
    checkpoint: Checkpoint, *, patterns: Sequence[str] = (), rows: int | None = DEFAULT_ROWS, chunks: bool = False
) -> RenderableType:
    """Render a checkpoint as a rich table with a summary above it.

    Args:
        checkpoint: An opened checkpoint.
        patterns: Show only tensors and values whose name matches.
        rows: Show at most this many rows; None for all.
        chunks: Whether to list each chunk under its tensor.
    """
    entries = select(checkpoint, patterns)
    shown = entries if rows is None else entries[:rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="fold")
    for column in ("shape", "dtype", "size", "shards", "rows per shard", "files", "part of"):
        table.add_column(column, justify="right" if column in ("size", "shards") else "left", no_wrap=column in ("dtype", "size"))
    for entry in shown:
        table.add_row(*_cells(_row(entry)))
        if chunks:
            for chunk in entry.chunks:
                table.add_row(*_cells(_chunk_row(chunk)), style="dim")
    named = [value for value in checkpoint.values.values() if matches(value.key, patterns)]
    values = list(small_values(checkpoint, named if rows is None else named[:rows]))
    parts: list[RenderableType] = [_summary(checkpoint, values, rows)]
    if entries:
        parts.append(table)
    elif patterns and not named:
        parts.append(Text(f"No name matches {' or '.join(map(repr, patterns))}.", style="italic"))
    if len(shown) < len(entries):
        parts.append(Text(f"and {counted(len(entries) - len(shown), 'more tensor')} (rows=None, --all: every one)", style="italic"))
    parts += [Text(""), *_values_table(values, len(named))] if entries and values else _values_table(values, len(named))
    return Group(*parts)


def _cells(texts: Iterable[str]) -> list[Text]:
    return [Text(printable(text)) for text in texts]  # Text does not interpret markup


def _row(entry: TensorEntry) -> list[str]:
    name = entry.key
    if entry.tied_to is not None:
        name += f"  = {entry.tied_to}"
    if entry.flat:
        name += "  (flat)"
    shards = f"{len(entry.chunks):,}" + (f" x{len(entry.replicas) + 1}" if entry.replicas else "")
    return [
        name,
        "x".join(map(str, entry.shape)) or "scalar",
        dtype_text(entry.dtype),
        bytes_text(entry.size_bytes),
        shards,
        _extent(entry),
        _file_text(entry.chunks.file_names()),
        entry.section,
    ]


def _extent(entry: TensorEntry) -> str:
    """Describe how the chunks split the tensor: ``4 on dim 0``, ``3-4 x 2 on dim 0, 1``, ``whole``, or ``none``."""
    if len(entry.chunks) <= 1 or not entry.shape:
        return "whole" if len(entry.chunks) else "none"
    sizes = entry.chunks.sizes
    cut = [dim for dim in range(len(entry.shape)) if bool((sizes[:, dim] != entry.shape[dim]).any())]
    if not cut:
        return "whole"
    texts = [
        f"{low}" if low == high else f"{low}-{high}"
        for low, high in ((int(sizes[:, d].min()), int(sizes[:, d].max())) for d in cut)
    ]
    return f"{' x '.join(texts)} on dim {', '.join(map(str, cut))}"


def _file_text(files: Sequence[str]) -> str:
    if len(files) <= 2:
        return ", ".join(files)
    return f"{files[0]} ... ({len(files):,} files)"


def _chunk_row(chunk: Chunk) -> list[str]:
    box = ", ".join(f"{o}:{o + n}" for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
    writer = "" if chunk.writer is None else f"rank {chunk.writer}"
    return [
        f"  [{box}]",
        "x".join(map(str, chunk.sizes)),
        "",
        bytes_text(chunk.length),
        writer,
        "",
        f"{chunk.file} @ {chunk.start}",
        "",
    ]


def _summary(checkpoint: Checkpoint, values: Iterable[SmallValue], rows: int | None) -> Text:
    numbers = totals(checkpoint)
    step = "" if checkpoint.step is None else f", step {checkpoint.step}"
    lines = [
        f"{checkpoint.path}: {KINDS[checkpoint.kind]}{step}",
        f"{counted(numbers['num_tensors'], 'tensor')}, {bytes_text(numbers['size_bytes'])}, in "
        f"{counted(numbers['num_chunks'], 'chunk')}; {counted(numbers['num_values'], 'other value')}; "
        f"{counted(numbers['num_files'], 'file')}, {bytes_text(numbers['file_bytes'])}",
    ]
    for section in SECTIONS:
        part = numbers[section]
        if part["num_tensors"]:
            lines.append(
                f"  {section}: {counted(part['num_tensors'], 'tensor')}, {counted(part['num_elements'], 'element')}, "
                f"{bytes_text(part['size_bytes'])}"
            )
    if is_new(checkpoint):
        lines.append(f"its index is read by {checkpoint.metadata['read_by']}")
    writers = sorted({rank for file in checkpoint.files for rank in [checkpoint.writer(file)] if rank is not None})
    if writers:
        lines.append(f"written by ranks {format_ranks(writers)}" if len(writers) > 1 else f"written by rank {writers[0]}")
    wrappers = wrappers_of(checkpoint)
    if wrappers:
        lines.append("wrappers in names: " + ", ".join(f"{name} ({count})" for name, count in wrappers.items()))
    missing = [(name, f"missing: {name}, which held {held.text}") for name, held in missing_files(checkpoint).items()]
    shown = missing if rows is None else missing[:_MISSING]
    lines += [f"{text}. {there}" if (there := also_in(checkpoint.root, name)) else text for name, text in shown]
    if len(missing) > len(shown):
        lines.append(f"and {counted(len(missing) - len(shown), 'more missing file')} (rows=None, --all: every one)")
    for group in ties(checkpoint):
        lines.append("tied: " + " = ".join(group))
    lines.extend(f"missing: {gap.what}" for gap in checkpoint.gaps if gap.severity == "error")
    lines.extend(f"note: {note}" for note in checkpoint.notes)
    strange = {*checkpoint.opaque, *(name for value in values for name in value.asks_for)}
    if strange:
        lines.append("names outside the allow-list, not run: " + ", ".join(sorted(strange)))
    return Text("\n".join(map(printable, lines)) + "\n")


def _values_table(values: Sequence[SmallValue], num_values: int) -> list[RenderableType]:
    if not values:
        return []
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("value", "content", "file", "part of"):
        table.add_column(column, overflow="fold")
    for value in values:
        table.add_row(*_cells((value.entry.key, value.text, value.entry.file, value.entry.section)))
    more = num_values - len(values)
    rest: list[RenderableType] = [Text(f"and {counted(more, 'more value')} (rows=None, --all: every one)", style="italic")]
    return [table, *(rest if more else [])]


# The width of a printed page; a notebook cuts off wider lines or scrolls them.
NOTEBOOK_COLUMNS = 96


def show(
    checkpoint: Checkpoint | str | Path, *, patterns: Sequence[str] = (), rows: int | None = DEFAULT_ROWS, chunks: bool = False
) -> None:
    """Write a checkpoint's table to the terminal or the notebook cell.

    Args:
        checkpoint: An opened checkpoint, or its path.
        patterns: Show only tensors and values whose name matches.
        rows: Show at most this many rows; None for all.
        chunks: Whether to list each chunk under its tensor.

    Raises:
        CheckpointError: As :func:`labkit.checkpoint.open_checkpoint`.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    console = Console()
    if console.is_jupyter:
        console.width = min(console.width, NOTEBOOK_COLUMNS)
    console.print(render(checkpoint, patterns=patterns, rows=rows, chunks=chunks))
