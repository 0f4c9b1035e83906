"""The files of a checkpoint to write, their contents, and the interface that each format's writer implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

from labkit.checkpoint.contents.contents import OutTensor, OutValue
from labkit.checkpoint.data.byte_ranges import copy_ranges
from labkit.checkpoint.data.hashed_file import HashedFile
from labkit.checkpoint.data.read import Reader, bits
from labkit.checkpoint.files.checksums import crc32
from labkit.checkpoint.index.layout import Box
from labkit.checkpoint.index.manifest import FileSum

Reserve = Callable[[int], AbstractContextManager[None]]
# For each tensor without its own bytes: maps its key to the tensor and the key whose bytes it shares.
Ties = Mapping[str, tuple[OutTensor, str]]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor to write."""

    tensor: OutTensor
    box: Box

    @property
    def size_bytes(self) -> int:
        return prod(self.box[1]) * self.tensor.source.dtype.itemsize

    def write(self, out: HashedFile, reader: Reader, reserve: Reserve) -> int:
        """Append the box's bytes to a file, in C order, and return their CRC-32."""
        ranges = self.tensor.source.ranges(reader, *self.box)
        if ranges is not None:
            return copy_ranges(reader, ranges, out)
        with reserve(self.cost):
            data = bits(self.tensor.source.read(reader, *self.box))
            view = data.numpy().data if data.numel() else b""
            out.write(view)
            return crc32(view)

    @property
    def cost(self) -> int:
        """Memory, in bytes, needed to read it if its bytes cannot be copied unchanged."""
        return self.tensor.source.cost(prod(self.box[1]))


def whole(tensor: OutTensor) -> Piece:
    """Return a tensor as one piece."""
    shape = tensor.source.shape
    return Piece(tensor, ((0,) * len(shape), shape))


@dataclass(frozen=True)
class Written:
    """A finished file.

    Attributes:
        total: Its size and hash.
        items: What the format needs to know about the file for its index.
    """

    total: FileSum
    items: list[Any] = field(default_factory=list)


@dataclass
class OutFile:
    """A file to write, with its contents in order."""

    name: str
    pieces: list[Piece] = field(default_factory=list)
    values: list[OutValue] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


class Writer(Protocol):
    """A format to write."""

    files: list[OutFile]
    single: str | None
    """The file that becomes the destination; None if the destination is a directory."""
    tied: Ties

    def write(self, file: OutFile, path: Path, reader: Reader, reserve: Reserve, progress: Callable[[int], None]) -> Written:
        """Write one file; ``reserve(size)`` blocks until that much memory may be used."""

    def finish(self, folder: Path, done: Mapping[str, Written]) -> dict[str, FileSum]:
        """Write what follows all files, such as an index."""
