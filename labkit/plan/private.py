"""Private parts of torch that planning uses, and which may change without notice.

`self_test` exercises all of them; the test suite runs it on every supported torch.
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

from labkit.checkpoint.index.layout import ShardDim
from labkit.checkpoint.state.shards import placement_of

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
    """Create a default process group that makes this process one of many ranks, although no other rank exists.

    Collectives return at once and move nothing. Ranks: local, in a process without a default group.

    Raises:
        RuntimeError: A default group exists.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this also registers the backend

    if dist.is_initialized():
        raise RuntimeError("a default process group exists in this process")
    # DTensor's cache of operations' shards is keyed by mesh, not by this process's coordinate on it.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


@contextmanager
def few_chunks() -> Iterator[None]:
    """While the block runs, let ``fully_shard`` use a single empty chunk for all ranks that get no row of a parameter.

    torch splits every parameter for all ranks, but keeps only the first chunk and this rank's. With few rows and many ranks, most
    chunks are empty tensors that are never used: with 1,024 ranks, making them takes half the time of sharding.
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
    """Return a mode in which tensors have shape, dtype, device and storage size, but no data. It also accepts tensors on meta."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def with_data() -> AbstractContextManager[Any]:
    """Return a context manager for use inside `without_data` that makes new tensors real again."""
    return unset_fake_temporarily()


def unchecked_global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Run ``DefaultSavePlanner.create_global_plan`` on the ranks' plans, but skip its check of the result."""
    global_plans, metadata = create_default_global_save_plan(dedup_save_plans(plans))
    return global_plans, replace(metadata, planner_data=plans[0].planner_data)


def checking_seconds(metadata: Metadata) -> float:
    """Measure how long ``DefaultSavePlanner`` takes to check a plan for overlaps and gaps.

    The planner looks at a tensor's shards only along its longest dim, so if another dim is sharded, it compares every pair of
    shards. Above `_MANY_SHARDS` shards, only the first ones are timed, and a parabola is fitted.
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
    logger.setLevel(logging.CRITICAL)  # it would warn about the shards left out
    try:
        began_s = time.process_time()
        _validate_global_plan([SavePlan([])], Metadata({str(place): entry for place, entry in enumerate(entries)}))
        return time.process_time() - began_s
    finally:
        logger.setLevel(level)


def files_of(items: Sequence[WriteItem], threads: int) -> list[list[WriteItem]]:
    """Divide a rank's items among its files as ``FileSystemWriter`` does."""
    return _split_by_size_and_type(threads, list(items))


def written(item: WriteItem, file: str, start: int, length: int) -> WriteResult:
    """Return what ``FileSystemWriter`` reports for an item that it wrote."""
    return WriteResult(item.index, length, _StorageInfo(file, start, length))


def metadata_bytes(metadata: Metadata, results: list[list[WriteResult]], directory: str) -> int:
    """Return the size of the ``.metadata`` that ``FileSystemWriter`` would write for a directory. Nothing is written to disk."""
    writer = _MetadataOnly(directory)
    writer.finish(metadata, results)
    return len(writer.fs.content)


class _MetadataOnly(FileSystemWriter):
    def __init__(self, directory: str) -> None:
        super().__init__(directory, sync_files=False)
        self.fs: Any = _InMemory()


class _InMemory:
    """A file system with a single file, kept in memory."""

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
    """Shard a linear layer for two of three ranks in turn, run a step, and compare with expected results.

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
