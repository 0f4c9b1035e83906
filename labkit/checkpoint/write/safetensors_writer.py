"""Writing of contents as safetensors: file by file, tensor by tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.checkpoint.data.hashed_file import HashedFile
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.formats.safetensors_format import NAMES
from labkit.checkpoint.index.manifest import FileSum
from labkit.checkpoint.write.out_files import OutFile, Piece, Reserve, Ties, Written


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
