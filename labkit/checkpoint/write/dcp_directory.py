"""Writing of contents as a DCP directory, tensor by tensor."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from labkit.checkpoint.contents.contents import OutValue
from labkit.checkpoint.data.hashed_file import HashedFile
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.files.checksums import read_into
from labkit.checkpoint.formats.dcp_format import METADATA_FILE
from labkit.checkpoint.index.manifest import FileSum
from labkit.checkpoint.index.model import Path_
from labkit.checkpoint.pickles.pickle_records import IntKey
from labkit.checkpoint.write.dcp_writer import DCP_VERSION, write_item, write_metadata
from labkit.checkpoint.write.out_files import OutFile, Reserve, Ties, Written
from labkit.checkpoint.write.torch_writer import write_tensor


@dataclass
class DcpWriter:
    """A writer of DCP directories. It notes where each file's items are, and makes ``.metadata`` from these notes."""

    files: list[OutFile]
    single: str | None = None
    plain: Mapping[str, Any] = field(default_factory=dict)
    """The values, by key, that are not copied byte for byte."""
    tied: Ties = field(default_factory=dict)
    """Tied tensors. Their bytes are stored once, and the index names them under both keys."""
    fields: int | None = None
    """The number of fields in each tensor's properties in ``.metadata``; None for the number that the torch here writes."""

    def write(self, file: OutFile, path: Path, reader: Reader, reserve: Reserve, progress: Callable[[int], None]) -> Written:
        items: list[Any] = []
        with HashedFile(path) as out:
            for value in file.values:
                start = out.tell()
                write_item(out, self._value(value, reader))
                items.append([value.key, None, None, start, out.tell() - start])
            for piece in file.pieces:
                start = out.tell()
                write_tensor(out, piece, reader, reserve)
                items.append([piece.tensor.key, list(piece.box[0]), list(piece.box[1]), start, out.tell() - start])
                progress(piece.size_bytes)
        return Written(out.total(), items)

    def _value(self, value: OutValue, reader: Reader) -> io.BytesIO:
        entry = value.entry
        if value.key not in self.plain and entry is not None and entry.length:
            reader.check_value(entry)  # DCP executes whatever a pickle names, so do not pass on an unsafe pickle
            data = bytearray(entry.length)
            got = read_into(reader.open(entry.file).fileno(), memoryview(data), entry.start)
            if got != entry.length:
                raise CheckpointError(f"{reader.checkpoint.root / entry.file}: it ends inside {entry.key!r}")
            return io.BytesIO(data)
        buffer = io.BytesIO()
        torch.save(self.plain[value.key], buffer)
        return buffer

    def finish(self, folder: Path, done: Mapping[str, Written]) -> dict[str, FileSum]:
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        tensors = {piece.tensor.key: piece.tensor for file in self.files for piece in file.pieces}
        for file in self.files:
            paths |= {value.key: _as_torch_flattens(value.path) for value in file.values}
            paths |= {piece.tensor.key: _as_torch_flattens(piece.tensor.path) for piece in file.pieces}
            for key, offsets, sizes, start, length in done[file.name].items:
                info = _StorageInfo(file.name, start, length)
                if offsets is None:
                    described[key] = BytesStorageMetadata()
                    storage[MetadataIndex(key)] = info
                    continue
                source = tensors[key].source
                made = described.setdefault(
                    key, TensorStorageMetadata(TensorProperties(dtype=source.dtype), torch.Size(source.shape), [])
                )
                assert isinstance(made, TensorStorageMetadata)
                storage[MetadataIndex(key, offsets, len(made.chunks))] = info
                made.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        for key, (tensor, owner) in self.tied.items():
            made = described[owner]
            assert isinstance(made, TensorStorageMetadata)
            described[key] = replace(made, chunks=list(made.chunks))
            paths[key] = _as_torch_flattens(tensor.path)
            for number, chunk in enumerate(made.chunks):
                storage[MetadataIndex(key, chunk.offsets, number)] = storage[MetadataIndex(owner, chunk.offsets)]
        metadata = Metadata(dict(described), planner_data=paths, storage_data=storage, version=DCP_VERSION)
        metadata.storage_meta = StorageMeta()
        return {METADATA_FILE: write_metadata(folder, metadata, self.fields)}


def _as_torch_flattens(path: Path_) -> Path_:
    """Return a path in DCP's form: dict keys are text, list positions are ints."""
    return tuple(str(step) if isinstance(step, IntKey) else step for step in path)
