"""Reading of data from a checkpoint: whole tensors, boxes of them, and values."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from labkit.checkpoint.data.open_files import OpenFiles
from labkit.checkpoint.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    FQNMismatchError,
    IncompleteCheckpointError,
    RankDivergenceError,
    UnsupportedTensorError,
)
from labkit.checkpoint.files.checksums import crc32, file_crc, read_into
from labkit.checkpoint.formats.archive import RecordRange, TorchArchive, expanded_bytes
from labkit.checkpoint.index.layout import is_contiguous, span
from labkit.checkpoint.index.model import Checkpoint, Chunk, ChunkTable, TensorEntry, ValueEntry
from labkit.checkpoint.pickles import safe_pickle
from labkit.checkpoint.pickles.pickle_records import Lazy, TensorRef, UnsupportedTensor


class Reader:
    """A reader of tensors and values of one checkpoint. It keeps files open; close it, or use it in a ``with`` block.

    Reading a box touches only the rows that it needs. Rows that are contiguous in both file and result are read straight into the
    result; otherwise one chunk's rows are also held in memory.

    Args:
        checkpoint: An opened checkpoint.
        checksums: Check the CRC-32 that torch stores for each record before returning any of the record; DCP and ``torch.load``
            never check it. This reads a storage once more if it is read in parts.

    Ranks: local. One thread at a time.
    """

    def __init__(self, checkpoint: Checkpoint, *, checksums: bool = False) -> None:
        self.checkpoint, self._checksums = checkpoint, checksums
        self._files = OpenFiles(checkpoint)
        # Keyed by file and position, and shared between forks; threads only add entries.
        self._sound: set[tuple[str, int]] = set()
        self._checking: dict[tuple[str, int], threading.Lock] = {}
        self._resolved: dict[tuple[str, int, int], tuple[RecordRange, TensorRef]] = {}

    def fork(self, *, checksums: bool | None = None) -> Reader:
        """Return a reader for another thread; it does not repeat checks that this one or its forks have made."""
        other = Reader(self.checkpoint, checksums=self._checksums if checksums is None else checksums)
        other._sound, other._checking, other._resolved = self._sound, self._checking, self._resolved
        return other

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def open(self, file: str) -> Any:
        """Return an open binary file of the checkpoint; see :meth:`OpenFiles.get`."""
        return self._files.get(file)

    def tensor(self, key: str) -> torch.Tensor:
        """Return a whole tensor, on the CPU.

        Raises:
            FQNMismatchError: The checkpoint has no tensor of this name.
            IncompleteCheckpointError: Part of it is in no chunk, or a file is missing or too short.
            CheckpointFormatError: The bytes are not what the index says.
            RankDivergenceError: Its form differs between ranks' files.
        """
        entry = self.checkpoint.tensors.get(key)
        if entry is None:
            raise self._unknown(key, self.checkpoint.tensors, self.checkpoint.values, "value()")
        if key in self.checkpoint.conflicts:
            raise RankDivergenceError(self.checkpoint.path, [f"{key} is {self.checkpoint.conflicts[key]}"])
        return self.box(entry, (0,) * len(entry.shape), entry.shape)

    def box(
        self, entry: TensorEntry, offsets: Sequence[int], sizes: Sequence[int], chunks: ChunkTable | None = None
    ) -> torch.Tensor:
        """Return a box of a tensor, as a new C-contiguous CPU tensor of shape ``sizes``; errors as in :meth:`tensor`."""
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
            if not self._rows_into(entry, chunk, low, extent, target):
                target.copy_(self._rows(entry, chunk, low, extent))
            filled += target.numel()
        if filled != result.numel():
            raise IncompleteCheckpointError(
                self.checkpoint.path,
                f"the chunks of {entry.key!r} give {filled} of the {result.numel()} elements "
                f"at {tuple(offsets)}, size {tuple(sizes)}. If each rank wrote a file of its own, name the directory "
                "that holds all of them.",
                advice="",
            )
        return result

    def chunk(self, entry: TensorEntry, chunk: Chunk) -> torch.Tensor:
        """Return one chunk's tensor, as a new C-contiguous CPU tensor."""
        return self._rows(entry, chunk, chunk.offsets, chunk.sizes).contiguous()

    def value(self, key: str) -> Any:
        """Return a value that is not a tensor, as plain Python data; tensors inside it are read.

        Raises:
            FQNMismatchError: The checkpoint has no value of this name.
            UnsafeCheckpointError: Its pickle names something outside the allow-list.
            UnsupportedTensorError: It is or holds a tensor that labkit does not read.
            CheckpointFormatError: It holds something that is not plain data.
        """
        entry = self.checkpoint.values.get(key)
        if entry is None:
            raise self._unknown(key, self.checkpoint.values, self.checkpoint.tensors, "tensor()")
        path = self.checkpoint.root / entry.file
        try:
            return self._value(entry, path)
        except UnsupportedTensorError as error:
            raise UnsupportedTensorError(path, error.what, key) from None

    def _value(self, entry: ValueEntry, path: Path) -> Any:
        if not entry.length:
            return safe_pickle.plain(entry.inline, path)
        archive = self._archive(entry.file, entry.start, entry.length)
        raw, _ = archive.load()
        left = expanded_bytes(entry.length)

        def read(ref: TensorRef) -> torch.Tensor:
            nonlocal left
            left -= ref.size_bytes
            if left < 0:
                raise UnsupportedTensorError(path, "tensors that are expanded to far more bytes than are stored")
            return self._referenced(archive, ref, entry)

        return safe_pickle.plain(raw, path, tensor=read)

    def stored(self, entry: ValueEntry) -> tuple[Any, tuple[str, ...]]:
        """Return a value for display, with records and references for what is not plain data, and the names outside the allow-list.

        Raises:
            CheckpointFormatError: It cannot be read.
        """
        if not entry.length:
            return entry.inline, ()
        return self._archive(entry.file, entry.start, entry.length).load("opaque")

    def check_value(self, entry: ValueEntry) -> None:
        """Raise :class:`UnsafeCheckpointError` if a value's pickle names something outside the allow-list."""
        if entry.length:
            self._archive(entry.file, entry.start, entry.length).load()

    def _unknown(self, key: str, names: Iterable[str], others: Iterable[str], method: str) -> FQNMismatchError:
        close = get_close_matches(key, names, n=3)
        advice = f"Read it with {method}." if key in others else "Checkpoint.tensors and Checkpoint.values list what there is."
        if close and key not in others:
            advice = f"Close to it: {', '.join(close)}."
        return FQNMismatchError(self.checkpoint.path, missing=[key], advice=advice)

    def _referenced(self, archive: TorchArchive, ref: TensorRef, entry: ValueEntry) -> torch.Tensor:
        where = archive.tensor(ref)
        reach, start = span(ref.shape, ref.strides) * ref.dtype.itemsize, ref.offset * ref.dtype.itemsize
        data = self._read(entry.file, where.start + start, reach, entry)
        return ref.lazy.resolve(data.view(ref.dtype).as_strided(ref.shape, ref.strides)).contiguous()

    # -- bytes -------------------------------------------------------------------------------------------------------

    def _rows_into(
        self, entry: TensorEntry, chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int], target: torch.Tensor
    ) -> bool:
        """Read a box straight into contiguous memory if it is one piece of the file; return False if it is not."""
        start, strides = self.data_start(entry, chunk)
        if strides is not None or not sizes or list(sizes[1:]) != list(chunk.sizes[1:]) or not target.is_contiguous():
            return False
        row = prod(chunk.sizes[1:]) * entry.dtype.itemsize
        self.check_record(entry, chunk)
        self._read_to(chunk.file, start + (offsets[0] - chunk.offsets[0]) * row, target.reshape(-1).view(torch.uint8), entry)
        return True

    def _rows(self, entry: TensorEntry, chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return the part of a chunk inside a box, which must lie within the chunk."""
        start, strides = self.data_start(entry, chunk)
        inner = tuple(slice(a - o, a - o + n) for a, o, n in zip(offsets, chunk.offsets, sizes, strict=True))
        itemsize = entry.dtype.itemsize
        whole = tuple(sizes) == chunk.sizes and strides is None
        if not whole:
            self.check_record(entry, chunk)
        if strides is not None:
            storage = self._read(chunk.file, start, span(chunk.sizes, strides) * itemsize, entry)
            return self._lazy(chunk).resolve(storage.view(entry.dtype).as_strided(chunk.sizes, strides)[inner])
        row = prod(chunk.sizes[1:]) * itemsize
        first = inner[0] if inner else slice(0, 1)
        data = self._read(chunk.file, start + first.start * row, (first.stop - first.start) * row, entry)
        if whole:
            record = self.record(chunk) if self._checksums else None
            at_hand = record is not None and record.length == data.numel()
            self.check_record(entry, chunk, crc32(data.numpy().data) if at_hand and data.numel() else None)
        if not inner:
            return data.view(entry.dtype).reshape(())
        shaped = data.view(entry.dtype).reshape(first.stop - first.start, *chunk.sizes[1:])
        return shaped[(slice(None), *inner[1:])]

    def check_record(self, entry: TensorEntry, chunk: Chunk, crc: int | None = None) -> None:
        """Compare the CRC-32 of the storage that contains a chunk, if there is one and this reader checks checksums.

        Args:
            entry: The entry of the storage, for messages.
            chunk: The chunk.
            crc: The CRC-32 of the whole storage, if it was just read; otherwise the storage is read, once for all forks.

        Raises:
            CorruptCheckpointError: It differs from the stored one.
        """
        record = self.record(chunk) if self._checksums else None
        if record is None:
            return
        key = (chunk.file, record.start)
        with self._checking.setdefault(key, threading.Lock()):
            if crc is None and key in self._sound:
                return
            if crc is None:
                crc = file_crc(self.open(chunk.file).fileno(), record.start, record.length)
            if crc != record.crc:
                raise CorruptCheckpointError(
                    self.checkpoint.root / chunk.file,
                    f"the bytes of {entry.key!r} at {record.start} do not match the checksum that was written with them. "
                    "Use another copy or an earlier checkpoint.",
                )
            self._sound.add(key)

    def record(self, chunk: Chunk) -> RecordRange | None:
        """Return the storage that contains a chunk; None in formats without storages."""
        if chunk.archive:
            return self._resolve(chunk)[0]
        records = self.checkpoint.records.get(chunk.file, [])
        at = bisect_right(records, (chunk.start, 1 << 62, 0)) - 1
        return RecordRange(*records[at]) if at >= 0 and chunk.length else None

    def data_start(self, entry: TensorEntry, chunk: Chunk) -> tuple[int, tuple[int, ...] | None]:
        """Return the position of a chunk's data in its file, and the strides, which are None for C order.

        Raises:
            CheckpointFormatError: The archive at that position has a different dtype or shape than the index says.
        """
        if not chunk.archive:
            return chunk.start, chunk.strides
        where, ref = self._resolve(chunk, entry.key)
        path = self.checkpoint.root / chunk.file
        if ref.dtype != entry.dtype or ref.shape != chunk.sizes:
            raise CheckpointFormatError(
                path,
                f"the index says that {entry.key!r} has dtype {entry.dtype} and a chunk of shape "
                f"{chunk.sizes} at byte {chunk.start}, "
                f"and the data there are {ref.dtype} of shape {ref.shape}",
            )
        plain = is_contiguous(ref.shape, ref.strides) and not ref.lazy
        return where.start + ref.offset * ref.dtype.itemsize, None if plain else ref.strides

    def _lazy(self, chunk: Chunk) -> Lazy:
        return self._resolve(chunk)[1].lazy if chunk.archive else chunk.lazy

    def _resolve(self, chunk: Chunk, key: str = "") -> tuple[RecordRange, TensorRef]:
        place = chunk.file, chunk.start, chunk.length
        known = self._resolved.get(place)
        if known is None:
            archive = self._archive(*place)
            ref, _ = archive.load()
            path = self.checkpoint.root / chunk.file
            if isinstance(ref, UnsupportedTensor):
                raise UnsupportedTensorError(path, ref.what, key)
            if not isinstance(ref, TensorRef):
                raise CheckpointFormatError(path, f"at byte {chunk.start} there is no tensor")
            where = archive.tensor(ref)
            if ref.size_bytes > where.length:  # DCP copies expanded tensors before it writes them
                raise UnsupportedTensorError(path, f"tensor expanded from {where.length:,} to {ref.size_bytes:,} bytes", key)
            known = self._resolved[place] = (where, ref)
        return known

    def _archive(self, file: str, start: int, length: int) -> TorchArchive:
        if self.checkpoint.metadata.get("transforms"):
            names = ", ".join(self.checkpoint.metadata["transforms"])
            raise CheckpointFormatError(
                self.checkpoint.path, f"it was written through stream transforms ({names}), which labkit does not undo"
            )
        archive = TorchArchive(self.open(file), self.checkpoint.root / file, start, length)
        name = f"{archive.prefix}/data.pkl"
        if self._checksums and crc32(archive.read(name)) != archive.record(name).crc:
            what = f"the record {name} at byte {start} does not match the checksum that was written with it."
            raise CorruptCheckpointError(self.checkpoint.root / file, what)
        return archive

    def _read(self, file: str, start: int, length: int, entry: TensorEntry | ValueEntry) -> torch.Tensor:
        data = torch.empty(length, dtype=torch.uint8)
        self._read_to(file, start, data, entry)
        return data

    def _read_to(self, file: str, start: int, target: torch.Tensor, entry: TensorEntry | ValueEntry) -> None:
        length = target.numel()
        got = read_into(self.open(file).fileno(), target.numpy().data, start) if length else 0
        if got != length:
            raise self.too_short(file, entry, start, length, got)

    def too_short(self, file: str, entry: TensorEntry | ValueEntry, start: int, length: int, got: int) -> IncompleteCheckpointError:
        """Return the error for a file that ends inside the bytes that an entry needs."""
        return IncompleteCheckpointError(
            self.checkpoint.root / file,
            f"{entry.key!r} needs the bytes from {start} to {start + length}, and the file ends at {start + got}",
        )


def _covers(chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    return all(o <= a and a + n <= o + m for a, n, o, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two CPU tensors have the same dtype, shape and bits (NaN equals itself, 0.0 differs from -0.0)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(bits(left), bits(right))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a flat uint8 tensor; it is a view if the tensor is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
