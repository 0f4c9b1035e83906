"""Splitting of flat parameters' moments, and joining of moments whose pieces are spread over the ranks' files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from labkit.checkpoint.contents.contents import Contents, OutTensor, OutValue
from labkit.checkpoint.contents.entry_names import split_in
from labkit.checkpoint.contents.flat import ParameterList, Stretch
from labkit.checkpoint.contents.sources import EntrySource, FlatSource
from labkit.checkpoint.convert.optimizer_order import ORDER_ADVICE, Meaning, Numbering
from labkit.checkpoint.errors import CheckpointMismatchError
from labkit.checkpoint.index.coverage import coverage
from labkit.checkpoint.index.model import Chunk, ChunkTable, Path_, TensorEntry


def check_flat_moments(contents: Contents, numbering: Numbering, meaning: Meaning) -> None:
    """Raise :class:`CheckpointMismatchError` if a moment and its flat parameter differ in length."""
    wrong = {
        number: unit
        for number, unit in meaning.units.items()
        if number in numbering.lengths and numbering.lengths[number] not in numbering.padded[unit]
    }
    if not wrong:
        return
    fits_another = all(any(numbering.lengths[number] in lengths for lengths in numbering.padded.values()) for number in wrong)
    raise CheckpointMismatchError(
        contents.checkpoint.path,
        [
            f"state {number} of its optimizer has {numbering.lengths[number]} elements, and the flat parameter of "
            f"{unit or 'the root'} has {numbering.padded[unit].start}"
            for number, unit in wrong.items()
        ],
        advice=f"The names are not in the optimizer's order. {ORDER_ADVICE}"
        if fits_another
        else "The shares of other ranks are missing. Keep the files of all ranks together; DCP saves only one rank's share of "
        "numbered state. To go on without it, leave it out with drop=[...] (--drop).",
    )


def split_flat_moments(contents: Contents, root: Path_, stretches: Mapping[int, Sequence[Stretch]]) -> None:
    """Give each parameter its stretch of a flat moment, and a copy of any state kept once per flat parameter (``step``)."""
    result: list[OutTensor] = []
    for item in contents.tensors:
        split = split_in(root, item)
        if split is None or not split[1].isdigit() or not isinstance(item.source, EntrySource):
            result.append(item)
            continue
        nesting, number, piece = split
        flat = None if not item.source.shape else concatenated(item.source.entry)
        for stretch in stretches[int(number)]:
            path = (*nesting, stretch.name, piece)
            source = item.source if flat is None else FlatSource(flat, stretch.start, stretch.shape)
            result.append(replace(item, path=path, source=source))
    contents.tensors = result
    values: list[OutValue] = []
    for value in contents.values:
        split = split_in(root, value)
        if split is None or not split[1].isdigit():
            values.append(value)
            continue
        nesting, number, piece = split
        values += [replace(value, path=(*nesting, stretch.name, piece)) for stretch in stretches[int(number)]]
    contents.values = values


def join_pieces(contents: Contents, root: Path_, parameters: ParameterList) -> None:
    """Join the pieces of moments in the ranks' files: 1-D pieces of the flattened parameter, in rank order."""
    joined: list[OutTensor] = []
    wrong: dict[str, tuple[int, int]] = {}
    for item in contents.tensors:
        split = split_in(root, item)
        shape = parameters.shapes.get(split[1]) if split is not None else None
        source = item.source
        in_pieces = len(contents.checkpoint.ranks) > 1 and len(source.shape) == 1
        if shape is None or not isinstance(source, EntrySource) or not in_pieces or _is_whole(source.entry, shape):
            joined.append(item)
            continue
        flat = concatenated(source.entry)
        if flat.numel == prod(shape):
            joined.append(replace(item, source=FlatSource(flat, 0, shape)))
        else:
            wrong[item.key] = flat.numel, prod(shape)
    if wrong:
        sizes = {prod(shape) for shape in parameters.shapes.values()}
        raise CheckpointMismatchError(
            contents.checkpoint.path,
            [
                f"{key}: its pieces have {found} elements together, and the parameter has {size}"
                for key, (found, size) in wrong.items()
            ],
            advice=f"The names are not in the optimizer's order. {ORDER_ADVICE}"
            if all(found in sizes for found, _ in wrong.values())
            else "Keep the files of all ranks together, and name the model that they were saved from.",
        )
    contents.tensors = joined


def _is_whole(entry: TensorEntry, shape: tuple[int, ...]) -> bool:
    """Return whether each file holds a whole moment or a box with a known position, not a stretch without one."""
    if entry.shape != shape or not coverage(entry.chunks, shape).exact:
        return False
    return len(entry.chunks) > 1 or all(chunk.sizes == shape for table in entry.replicas for chunk in table)


def concatenated(entry: TensorEntry) -> TensorEntry:
    """Return the pieces of the rank files as one vector, in rank order."""
    chunks: list[Chunk] = []
    at = 0
    for table in (entry.chunks, *entry.replicas):
        for chunk in table:
            if chunk.numel:
                chunks.append(replace(chunk, offsets=(at,)))
                at += chunk.numel
    return replace(entry, shape=(at,), chunks=ChunkTable.of(chunks, 1), replicas=(), flat=True)
