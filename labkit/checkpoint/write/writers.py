"""Writing of contents as safetensors or as one torch.save file: file by file, tensor by tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

from labkit.checkpoint.contents.contents import OutTensor, OutValue
from labkit.checkpoint.data.byte_ranges import copy_ranges
from labkit.checkpoint.data.hashed_file import HashedFile
from labkit.checkpoint.data.read import Reader, bits
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.files.checksums import crc32
from labkit.checkpoint.formats.safetensors_format import NAMES
from labkit.checkpoint.index.layout import Box
from labkit.checkpoint.index.manifest import FileSum
from labkit.checkpoint.write.torch_writer import write_state

Reserve = Callable[[int], AbstractContextManager[None]]
# Maps the key of a tensor without bytes of its own to the tensor and the key whose bytes it shares.
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
        """Bytes of memory that reading it takes if its bytes cannot be copied unchanged."""
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
        items: Information about the file that the format needs for its index.
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


@dataclass
class SafetensorsWriter:
    """Safetensors files, with an index if there are several."""

    files: list[OutFile]
    single: str | None = None
    index_name: str = "model.safetensors.index.json"
    tied: Ties = field(default_factory=dict)
    """Tied tensors are left out and noted with their owner in the metadata, as ``safetensors.torch.save_model`` does."""

    def write(self, file: OutFile, path: Path, reader: Reader, reserve: Reserve, progress: Callable[[int], None]) -> Written:
        # Largest dtype first, for alignment, as in the safetensors library.
        pieces = sorted(file.pieces, key=lambda piece: (-piece.tensor.source.dtype.itemsize, piece.tensor.key))
        with HashedFile(path) as out:
            out.write(_header(pieces, self.tied))
            for piece in pieces:
                piece.write(out, reader, reserve)
                progress(piece.size_bytes)
        return Written(out.total())

    def finish(self, folder: Path, done: Mapping[str, Written]) -> dict[str, FileSum]:
        if self.single is not None:
            return {}
        weight_map = {piece.tensor.key: file.name for file in self.files for piece in file.pieces}
        total = sum(file.size_bytes for file in self.files)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        with HashedFile(folder / self.index_name) as out:
            out.write(text.encode())
        return {self.index_name: out.total()}


def _header(pieces: Sequence[Piece], tied: Ties) -> bytes:
    own = {piece.tensor.key for piece in pieces}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | {key: owner for key, (_, owner) in tied.items() if owner in own}}
    at = 0
    for piece in pieces:
        source = piece.tensor.source
        if source.dtype not in NAMES:
            raise CheckpointError(
                f"{piece.tensor.key}: safetensors has no {source.dtype}. Change it with dtypes=... (--dtype), or write DCP."
            )
        header[piece.tensor.key] = {
            "dtype": NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [at, at + piece.size_bytes],
        }
        at += piece.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass
class TorchWriter:
    """One torch.save file with the whole nested state."""

    files: list[OutFile]
    single: str | None
    plain: Mapping[str, Any] = field(default_factory=dict)
    tied: Ties = field(default_factory=dict)
    """Always empty: pieces with the same source share one storage."""

    def write(self, file: OutFile, path: Path, reader: Reader, reserve: Reserve, progress: Callable[[int], None]) -> Written:
        with HashedFile(path) as out:
            write_state(out, path.name, file.pieces, file.values, self.plain, reader, reserve, progress)
        return Written(out.total())

    def finish(self, folder: Path, done: Mapping[str, Written]) -> dict[str, FileSum]:
        return {}
