"""The ``.metadata`` of a large DCP checkpoint, without its data."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

ROWS, COLUMNS = 4, 8
ITEM_BYTES = 1300


def write_index(folder: Path, num_tensors: int, num_ranks: int) -> int:
    """Write ``folder/.metadata`` as :func:`torch.distributed.checkpoint.save` does, and return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model.layers.{tensor}.attention.wq.weight" for tensor in range(num_tensors)]
    properties = TensorProperties(dtype=torch.bfloat16)
    tensors = {name: TensorStorageMetadata(properties, torch.Size([num_ranks * ROWS, COLUMNS]), []) for name in names}
    places = {}
    for rank in range(num_ranks):
        offset = torch.Size((rank * ROWS, 0))
        for number, name in enumerate(names):
            tensors[name].chunks.append(ChunkStorageMetadata(offset, torch.Size([ROWS, COLUMNS])))
            places[MetadataIndex(name, offset, rank)] = _StorageInfo(f"__{rank}_0.distcp", number * ITEM_BYTES, ITEM_BYTES)
    paths = {name: ("model", name.removeprefix("model.")) for name in names}
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(Metadata(tensors, paths, places, StorageMeta(), "1.0.0")))
    return path.stat().st_size
