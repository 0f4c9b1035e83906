"""Everything of torch that a plan needs and that torch does not promise to keep.

`self_test` uses each of them in earnest; the test suite runs it on every supported torch.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from labkit.checkpoint.layout import ShardDim
from labkit.checkpoint.shards import placement_of

__all__ = [
    "FakeTensor",
    "checking_seconds",
    "fake_world",
    "few_chunks",
    "files_of",
    "metadata_bytes",
    "self_test",
    "unchecked_global_plan",
    "with_data",
    "without_data",
    "written",
]

_MANY_SHARDS, _SOME_SHARDS = 512, (256, 512)


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A default process group in which this process is one of many ranks, and nobody else is there.

    Collectives return at once and move nothing. Ranks: local, in a process without a default group.

    Raises:
        RuntimeError: There is a default group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend as well

    if dist.is_initialized():
        raise RuntimeError("a default process group exists in this process")
    # DTensor remembers which shard an operation gives by the mesh, without this process's place on it.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


@contextmanager
def few_chunks() -> Iterator[None]:
    """While the block runs, ``fully_shard`` makes one empty chunk for all ranks that get no row of a parameter, not one for each.

    It cuts every parameter for all ranks and keeps this rank's chunk and the first. Where the rows are few and the ranks are many,
    most of its time goes into empty tensors that nobody looks at: with 1,024 ranks half of the time of sharding.
    """
    original = _fsdp_param._chunk_with_empty

    def chunked(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
        return chunks + [chunks[0].new_empty(0)] * (num_chunks - len(chunks))

    setattr(_fsdp_param, "_chunk_with_empty", chunked)  # noqa: B010 (torch's module is typed)
    try:
        yield
    finally:
        setattr(_fsdp_param, "_chunk_with_empty", original)  # noqa: B010


def without_data() -> FakeTensorMode:
    """A mode in which tensors have shape, dtype, device and storage size, and no data. Tensors on meta may be used in it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def with_data() -> AbstractContextManager[Any]:
    """Inside of `without_data`, a block in which tensors are real again."""
    return unset_fake_temporarily()


def unchecked_global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """What ``DefaultSavePlanner.create_global_plan`` makes of the ranks' plans, without its check of the result."""
    global_plans, metadata = create_default_global_save_plan(dedup_save_plans(plans))
    return global_plans, replace(metadata, planner_data=plans[0].planner_data)


def checking_seconds(metadata: Metadata) -> float:
    """The time that ``DefaultSavePlanner`` takes to check a plan for overlaps and gaps.

    It compares the shards of a tensor along the tensor's longest dim only, so where another dim is sharded it compares each
    shard with each other. Of more shards than `_MANY_SHARDS` it is timed on the first ones, and a parabola is laid through.
    """
    found = [entry for entry in metadata.state_dict_metadata.values() if isinstance(entry, TensorStorageMetadata)]
    num_shards = max((len(entry.chunks) for entry in found), default=0)
    if num_shards <= _MANY_SHARDS:
        return _seconds_to_check(found)
    half, full = (_seconds_to_check([replace(entry, chunks=entry.chunks[:count]) for entry in found]) for count in _SOME_SHARDS)
    square = max(0.0, (full - 2 * half) / (_SOME_SHARDS[1] ** 2 / 2))
    return (full / _SOME_SHARDS[1] - square * _SOME_SHARDS[1]) * num_shards + square * num_shards**2


def _seconds_to_check(entries: list[TensorStorageMetadata]) -> float:
    logger = logging.getLogger(_validate_global_plan.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it warns of the shards that were left out
    try:
        began_s = time.process_time()
        _validate_global_plan([SavePlan([])], Metadata({str(place): entry for place, entry in enumerate(entries)}))
        return time.process_time() - began_s
    finally:
        logger.setLevel(level)


def files_of(items: Sequence[WriteItem], threads: int) -> list[list[WriteItem]]:
    """How ``FileSystemWriter`` divides a rank's items over its files."""
    return _split_by_size_and_type(threads, list(items))


def written(item: WriteItem, file: str, start: int, length: int) -> WriteResult:
    """What ``FileSystemWriter`` reports of an item that it has written."""
    return WriteResult(item.index, length, _StorageInfo(file, start, length))


def metadata_bytes(metadata: Metadata, results: list[list[WriteResult]], directory: str) -> int:
    """The size of the file ``.metadata`` that ``FileSystemWriter`` writes for a directory. Nothing is written there."""
    writer = _MetadataOnly(directory)
    writer.finish(metadata, results)
    return len(writer.fs.content)


class _MetadataOnly(FileSystemWriter):
    def __init__(self, directory: str) -> None:
        super().__init__(directory, sync_files=False)
        self.fs: Any = _InMemory()


class _InMemory:
    """A file system with one file, which is not kept on disk."""

    def __init__(self) -> None:
        self.content = b""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.BytesIO]:
        stream = io.BytesIO()
        yield stream
        self.content = stream.getvalue()

    def concat_path(self, path: Any, suffix: str) -> Path:
        return Path(path) / suffix

    def exists(self, path: Any) -> bool:
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        pass


def self_test() -> None:
    """Shard a linear layer on two of three ranks in turn, run a step, and compare with what is known of it.

    Raises:
        AssertionError: This torch is not as expected.

    Ranks: local, in a process without a default group.
    """
    for rank, rows in ((0, 2), (2, 0)):
        with fake_world(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            with without_data():
                layer = nn.Linear(4, 4, bias=False)
                fully_shard(layer, mesh=mesh)
                loss = layer(torch.ones(2, 4)).sum()
                loss.backward()
                with with_data():
                    assert int(torch.ones(2).sum()) == 2
            weight = layer.weight
            assert isinstance(weight, DTensor)
            local = weight.to_local()
            assert isinstance(local, FakeTensor)
            assert isinstance(loss, FakeTensor)
            assert tuple(local.shape) == (rows, 4), f"rank {rank} of 3 holds {tuple(local.shape)} of 4 rows"
            assert local.untyped_storage().nbytes() == 2 * 4 * 4, "uneven shards are not padded"
            assert [placement_of(place) for place in weight.placements] == [ShardDim(0)]
    whole = torch.ones(4, 2)
    expected = [tuple(chunk.shape) for chunk in _fsdp_param._chunk_with_empty(whole, 6, dim=0)]
    with few_chunks():
        assert [tuple(chunk.shape) for chunk in _fsdp_param._chunk_with_empty(whole, 6, dim=0)] == expected
    item = WriteItem(MetadataIndex("a", torch.Size([0])), WriteItemType.BYTE_IO)
    assert files_of([item], 2) == [[item], []]
    empty, one = (metadata_bytes(Metadata({}), [[written(item, "f", 0, 9)] * count], "d") for count in (0, 1))
    assert 0 < empty < one
