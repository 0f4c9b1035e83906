"""Read data out of a checkpoint: whole tensors, boxes of them, and values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from labkit.checkpoint import safe_pickle
from labkit.checkpoint.archive import RecordRange, TorchArchive
from labkit.checkpoint.errors import CheckpointFormatError, CorruptCheckpointError, IncompleteCheckpointError
from labkit.checkpoint.layout import is_contiguous, span
from labkit.checkpoint.model import Checkpoint, Chunk, ChunkTable, TensorEntry, ValueEntry
from labkit.checkpoint.safe_pickle import TensorRef

_READ_BYTES = 1 << 28  # the kernel moves at most 2 GiB a call


class Reader:
    """Reads tensors and values of one checkpoint. Keeps its files open; close it, or use it in a ``with`` block.

    Reading a box touches only the rows of the chunks that it needs, and allocates the box and at most one chunk's rows.

    Ranks: local.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._files: dict[str, Any] = {}
        self._resolved: dict[tuple[str, int], tuple[RecordRange, TensorRef]] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def tensor(self, key: str) -> torch.Tensor:
        """A whole tensor, on the CPU.

        Raises:
            IncompleteCheckpointError: A region of it is in no chunk, or a file is missing or too short.
            CheckpointFormatError: The bytes are not what the index says.
        """
        entry = self.checkpoint.tensors[key]
        return self.box(entry, (0,) * len(entry.shape), entry.shape)

    def box(
        self, entry: TensorEntry, offsets: Sequence[int], sizes: Sequence[int], chunks: ChunkTable | None = None
    ) -> torch.Tensor:
        """A box of a tensor, as a new C-contiguous CPU tensor of shape ``sizes``; errors as in :meth:`tensor`."""
        chunks = entry.chunks if chunks is None else chunks
        wanted = chunks.intersecting(offsets, sizes)
        first: Chunk | None = chunks[wanted[0]] if wanted else None
        if first is not None and len(wanted) == 1 and _covers(first, offsets, sizes):
            return self._rows(entry, first, offsets, sizes).contiguous()
        result = torch.empty(tuple(sizes), dtype=entry.dtype)
        filled = 0
        for index in wanted:
            chunk = chunks[index]
            low = [max(a, b) for a, b in zip(chunk.offsets, offsets, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True)]
            extent = [b - a for a, b in zip(low, high, strict=True)]
            target = result[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))]
            target.copy_(self._rows(entry, chunk, low, extent))
            filled += target.numel()
        if filled != result.numel():
            raise IncompleteCheckpointError(
                self.checkpoint.path,
                f"the chunks of {entry.key!r} give {filled} of the {result.numel()} elements at {tuple(offsets)}, size {tuple(sizes)}",
            )
        return result

    def chunk(self, entry: TensorEntry, chunk: Chunk) -> torch.Tensor:
        """One chunk's tensor, as a new C-contiguous CPU tensor."""
        return self._rows(entry, chunk, chunk.offsets, chunk.sizes).contiguous()

    def value(self, key: str) -> Any:
        """A value that is not a tensor, as plain Python data; tensors inside it are read.

        Raises:
            UnsafeCheckpointError: Its pickle names something outside the allow-list.
            CheckpointFormatError: It holds something that is no plain data.
        """
        entry = self.checkpoint.values[key]
        path = self.checkpoint.root / entry.file
        if not entry.length:
            return safe_pickle.plain(entry.inline, path)
        archive = self._archive(entry.file, entry.start, entry.length)
        raw, _ = archive.load()
        return safe_pickle.plain(raw, path, tensor=lambda ref: self._referenced(archive, ref, entry))

    def _referenced(self, archive: TorchArchive, ref: TensorRef, entry: ValueEntry) -> torch.Tensor:
        where = archive.storage(ref.storage.key)
        reach, start = span(ref.shape, ref.strides) * ref.dtype.itemsize, ref.offset * ref.dtype.itemsize
        if reach and start + reach > where.length:
            raise CheckpointFormatError(
                self.checkpoint.root / entry.file, f"a tensor in {entry.key!r} reaches past the end of its storage"
            )
        data = self._read(entry.file, where.start + start, reach, entry)
        return data.view(ref.dtype).as_strided(ref.shape, ref.strides).contiguous()

    # -- bytes -------------------------------------------------------------------------------------------------------

    def _rows(self, entry: TensorEntry, chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """The part of a chunk inside a box, which lies within the chunk."""
        start, strides = self.data_start(entry, chunk)
        inner = tuple(slice(a - o, a - o + n) for a, o, n in zip(offsets, chunk.offsets, sizes, strict=True))
        itemsize = entry.dtype.itemsize
        if strides is not None:
            storage = self._read(chunk.file, start, span(chunk.sizes, strides) * itemsize, entry)
            return storage.view(entry.dtype).as_strided(chunk.sizes, strides)[inner]
        if not inner:
            return self._read(chunk.file, start, itemsize, entry).view(entry.dtype).reshape(())
        row = itemsize
        for size in chunk.sizes[1:]:
            row *= size
        first = inner[0]
        data = self._read(chunk.file, start + first.start * row, (first.stop - first.start) * row, entry)
        shaped = data.view(entry.dtype).reshape(first.stop - first.start, *chunk.sizes[1:])
        return shaped[(slice(None), *inner[1:])]

    def data_start(self, entry: TensorEntry, chunk: Chunk) -> tuple[int, tuple[int, ...] | None]:
        """Where a chunk's data begin in its file, and their strides when they are not in C order.

        Raises:
            CheckpointFormatError: The archive there holds another dtype or shape than the index says.
        """
        if not chunk.archive:
            return chunk.start, chunk.strides
        where, ref = self._resolve(chunk)
        path = self.checkpoint.root / chunk.file
        if ref.dtype != entry.dtype or ref.shape != chunk.sizes:
            raise CheckpointFormatError(
                path,
                f"the index says that {entry.key!r} has dtype {entry.dtype} and a chunk of shape {chunk.sizes} at byte {chunk.start}, "
                f"and the data there are {ref.dtype} of shape {ref.shape}",
            )
        plain = is_contiguous(ref.shape, ref.strides)
        reach = (chunk.numel if plain else span(ref.shape, ref.strides)) * ref.dtype.itemsize
        start = ref.offset * ref.dtype.itemsize
        if reach and start + reach > where.length:
            raise CheckpointFormatError(path, f"a chunk of {entry.key!r} reaches past the end of its storage")
        return where.start + start, None if plain else ref.strides

    def _resolve(self, chunk: Chunk) -> tuple[RecordRange, TensorRef]:
        known = self._resolved.get((chunk.file, chunk.start))
        if known is None:
            archive = self._archive(chunk.file, chunk.start, chunk.length)
            ref, _ = archive.load()
            if not isinstance(ref, TensorRef):
                raise CheckpointFormatError(self.checkpoint.root / chunk.file, f"at byte {chunk.start} there is no tensor")
            known = self._resolved[chunk.file, chunk.start] = (archive.storage(ref.storage.key), ref)
        return known

    def _archive(self, file: str, start: int, length: int) -> TorchArchive:
        if self.checkpoint.metadata.get("transforms"):
            names = ", ".join(self.checkpoint.metadata["transforms"])
            raise CheckpointFormatError(
                self.checkpoint.path, f"it was written through stream transforms ({names}), which labkit does not undo"
            )
        return TorchArchive(self.open(file), self.checkpoint.root / file, start, length)

    def open(self, file: str) -> Any:
        """An open binary file of the checkpoint; it stays open until :meth:`close`.

        Raises:
            IncompleteCheckpointError: It is missing.
        """
        found = self._files.get(file)
        if found is None:
            path: Path = self.checkpoint.root / file
            try:
                found = self._files[file] = path.open("rb")
            except FileNotFoundError:
                raise IncompleteCheckpointError(path, "the checkpoint's index names this file, and it is missing") from None
        return found

    def _read(self, file: str, start: int, length: int, entry: TensorEntry | ValueEntry) -> torch.Tensor:
        data = torch.empty(length, dtype=torch.uint8)
        if length:
            got = read_into(self.open(file).fileno(), data.numpy().data, start)
            if got != length:
                raise IncompleteCheckpointError(
                    self.checkpoint.root / file,
                    f"{entry.key!r} needs the bytes from {start} to {start + length}, and the file ends at {start + got}",
                )
        return data


def read_into(fd: int, buffer: memoryview, start: int) -> int:
    """Fill a buffer from a file position; returns the bytes read, fewer only at the file's end."""
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done : done + _READ_BYTES]], start + done)
        if got == 0:
            break
        done += got
    return done


def _covers(chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    return all(o <= a and a + n <= o + m for a, n, o, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True))


def check_same(left: torch.Tensor, right: torch.Tensor, path: object, key: str) -> None:
    """Raise :class:`CorruptCheckpointError` unless two tensors have equal bits."""
    if not same_bits(left, right):
        raise CorruptCheckpointError(path, f"{key!r} does not hold the bits that were written")


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two CPU tensors have the same dtype, shape and bits (NaN equals itself, 0.0 differs from -0.0)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(bits(left), bits(right))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, as a flat uint8 view where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
