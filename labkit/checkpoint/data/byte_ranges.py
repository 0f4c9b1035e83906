"""Byte ranges in a checkpoint's files that make up a box of a tensor, and copying of them unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from labkit.checkpoint.data.hashed_file import HashedFile
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.files.checksums import crc32_combine
from labkit.checkpoint.index.model import Chunk, ChunkTable, TensorEntry


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Part of a chunk's data.

    Attributes:
        entry, chunk: The tensor and the chunk.
        start, length: The position in the chunk's file.
    """

    entry: TensorEntry
    chunk: Chunk
    start: int
    length: int


def byte_ranges(
    reader: Reader, entry: TensorEntry, offsets: Sequence[int], sizes: Sequence[int], chunks: ChunkTable | None = None
) -> list[ByteRange] | None:
    """Return the ranges whose concatenation is a box in C order; None if the box is not made of whole rows of chunks.

    The result is also None if chunks overlap or leave a gap: :meth:`Reader.box` then reports what is wrong.
    """
    table = entry.chunks if chunks is None else chunks
    if 0 in sizes:
        return []
    found: list[ByteRange] = []
    row = prod(sizes[1:]) * entry.dtype.itemsize
    at, end = (offsets[0], offsets[0] + sizes[0]) if sizes else (0, 1)
    wanted = [0] if len(table) == 1 else table.intersecting(offsets, sizes)
    for chunk in sorted((table[index] for index in wanted), key=lambda chunk: chunk.offsets):
        first, count = (chunk.offsets[0], chunk.sizes[0]) if sizes else (0, 1)
        same_rows = (*chunk.offsets[1:], *chunk.sizes[1:]) == (*offsets[1:], *sizes[1:])
        start, strides = reader.data_start(entry, chunk)
        if not same_rows or strides is not None or first > at or (found and first != at):
            return None
        high = min(first + count, end)
        found.append(ByteRange(entry, chunk, start + (at - first) * row, (high - at) * row))
        at = high
    return found if at == end else None


def copy_ranges(reader: Reader, ranges: Sequence[ByteRange], out: HashedFile) -> int:
    """Append ranges to a file, comparing checksums as the reader does, and return the CRC-32 of the ranges.

    Raises:
        IncompleteCheckpointError: A file ends inside a range.
        CorruptCheckpointError: A storage's bytes do not match the checksum that was written with them.

    Ranks: local. Needs no memory for the data.
    """
    total = 0
    for part in ranges:
        record = reader.record(part.chunk)
        whole = record is not None and (record.start, record.length) == (part.start, part.length)
        if not whole:
            reader.check_record(part.entry, part.chunk)
        copied, crc = out.copy(reader.open(part.chunk.file).fileno(), part.start, part.length)
        if copied != part.length:
            raise reader.too_short(part.chunk.file, part.entry, part.start, part.length, copied)
        if whole:
            reader.check_record(part.entry, part.chunk, crc)
        total = crc32_combine(total, crc, part.length)
    return total
