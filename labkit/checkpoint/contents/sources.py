"""Sources of the values of an output tensor: an entry of a checkpoint, a stretch of a flat parameter, a conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from labkit.checkpoint.data.byte_ranges import ByteRange, byte_ranges
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.dtypes import convert
from labkit.checkpoint.errors import DtypeNarrowingError
from labkit.checkpoint.index.model import ChunkTable, TensorEntry


class Source(Protocol):
    """A tensor that can be read box by box."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that :meth:`read` returns."""

    @property
    def label(self) -> str:
        """The source's name in a plan; sources with equal labels have equal values."""

    def read(self, reader: Reader, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Return a box, as a new C-contiguous CPU tensor."""

    def ranges(self, reader: Reader, offsets: Sequence[int], sizes: Sequence[int]) -> list[ByteRange] | None:
        """Return the byte ranges whose concatenation is the box; None if it must be read and assembled."""

    def cost(self, numel: int) -> int:
        """Return the peak memory, in bytes, for reading this many elements."""


@dataclass(frozen=True)
class EntrySource:
    """A tensor of a checkpoint, unchanged, or one rank's copy of it."""

    entry: TensorEntry
    chunks: ChunkTable | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    @property
    def label(self) -> str:
        if self.chunks is None:
            return self.entry.tied_to or self.entry.key
        return f"{self.entry.key} in {self.chunks.file_names()}"

    def read(self, reader: Reader, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return reader.box(self.entry, offsets, sizes, self.chunks)

    def ranges(self, reader: Reader, offsets: Sequence[int], sizes: Sequence[int]) -> list[ByteRange] | None:
        return byte_ranges(reader, self.entry, offsets, sizes, self.chunks)

    def cost(self, numel: int) -> int:
        return numel * self.dtype.itemsize


@dataclass(frozen=True)
class FlatSource:
    """A parameter inside a flat one: elements ``start`` to ``start + prod(shape)``, in C order."""

    flat: TensorEntry
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def label(self) -> str:
        return f"{self.flat.key}[{self.start}:{self.start + prod(self.shape)}]"

    def read(self, reader: Reader, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        if not self.shape:
            return reader.box(self.flat, (self.start,), (1,)).reshape(())
        row = prod(self.shape[1:])
        rows = reader.box(self.flat, (self.start + offsets[0] * row,), (sizes[0] * row,)).reshape(sizes[0], *self.shape[1:])
        inner = tuple(slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True))
        return rows[(slice(None), *inner)].contiguous()

    def ranges(self, reader: Reader, offsets: Sequence[int], sizes: Sequence[int]) -> list[ByteRange] | None:
        if tuple(sizes[1:]) != self.shape[1:]:
            return None
        row = prod(self.shape[1:])
        first, count = (offsets[0] * row, sizes[0] * row) if sizes else (0, 1)
        return byte_ranges(reader, self.flat, (self.start + first,), (count,))

    def cost(self, numel: int) -> int:
        return numel * self.dtype.itemsize


@dataclass(frozen=True)
class CastSource:
    """A source converted to another dtype; it is an error if a finite value becomes inf or NaN."""

    inner: Source
    dtype: torch.dtype
    key: str
    path: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def label(self) -> str:
        return f"{self.inner.label} as {self.dtype}"

    def read(self, reader: Reader, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        converted, lost = convert(self.inner.read(reader, offsets, sizes), self.dtype)
        if lost is not None:
            raise DtypeNarrowingError(self.path, [f"{self.key}: {lost}"], advice="Choose a dtype with a larger range for it.")
        return converted

    def ranges(self, reader: Reader, offsets: Sequence[int], sizes: Sequence[int]) -> list[ByteRange] | None:
        return None

    def cost(self, numel: int) -> int:
        return self.inner.cost(numel) + numel * self.dtype.itemsize


def origin(source: Source) -> str:
    """Return the key of the checkpoint's entry that a source reads."""
    while isinstance(source, CastSource):
        source = source.inner
    return source.flat.key if isinstance(source, FlatSource) else source.entry.key  # type: ignore[attr-defined]
