"""Write contents as safetensors or as one torch.save file: file by file, tensor by tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

from labkit.checkpoint.byte_ranges import copy_ranges
from labkit.checkpoint.checksums import crc32
from labkit.checkpoint.contents import OutTensor, OutValue
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.hashed_file import HashedFile
from labkit.checkpoint.layout import Box
from labkit.checkpoint.manifest import FileSum
from labkit.checkpoint.read import Reader, bits
from labkit.checkpoint.safetensors_format import NAMES
from labkit.checkpoint.torch_writer import write_state

Reserve = Callable[[int], AbstractContextManager[None]]
# Key of a tensor that has no bytes of its own to the tensor and the key whose bytes it has.
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
        """Append the box's bytes to a file, in C order; returns their CRC-32."""
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
        """Bytes of memory that reading it takes, where its bytes cannot be copied as they are."""
        return self.tensor.source.cost(prod(self.box[1]))


def whole(tensor: OutTensor) -> Piece:
    """A tensor in one piece."""
    shape = tensor.source.shape
    return Piece(tensor, ((0,) * len(shape), shape))


@dataclass(frozen=True)
class Written:
    """A finished file.

    Attributes:
        total: Its size and hash.
        items: What the format needs to know of it for its index.
    """

    total: FileSum
    items: list[Any] = field(default_factory=list)


@dataclass
class OutFile:
    """A file to write and what goes into it, in order."""

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
    """The file that becomes the destination; None when the destination is a directory."""
    tied: Ties

    def write(self, file: OutFile, path: Path, reader: Reader, reserve: Reserve, progress: Callable[[int], None]) -> Written:
        """Write one file; ``reserve(size)`` holds back until that much memory may be used."""

    def finish(self, folder: Path, done: Mapping[str, Written]) -> dict[str, FileSum]:
        """Write what comes after all files, such as an index."""


@dataclass
class SafetensorsWriter:
    """Safetensors files, with an index when there are several."""

    files: list[OutFile]
    single: str | None = None
    index_name: str = "model.safetensors.index.json"
    tied: Ties = field(default_factory=dict)
    """They are left out and noted beside what they are tied to, as ``safetensors.torch.save_model`` does it."""

    def write(self, file: OutFile, path: Path, reader: Reader, reserve: Reserve, progress: Callable[[int], None]) -> Written:
        # Aligned to the largest dtype first, as the safetensors library orders them.
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
    """Empty: among the pieces, those with one source share one storage."""

    def write(self, file: OutFile, path: Path, reader: Reader, reserve: Reserve, progress: Callable[[int], None]) -> Written:
        with HashedFile(path) as out:
            write_state(out, path.name, file.pieces, file.values, self.plain, reader, reserve, progress)
        return Written(out.total())

    def finish(self, folder: Path, done: Mapping[str, Written]) -> dict[str, FileSum]:
        return {}
