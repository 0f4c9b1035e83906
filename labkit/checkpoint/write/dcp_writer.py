"""A storage writer and a planner for :func:`torch.distributed.checkpoint.save`.

The files have DCP's own format, so :func:`torch.distributed.checkpoint.load` reads them. Unlike
:class:`torch.distributed.checkpoint.FileSystemWriter`, this writer hashes every file while writing it, fails the save if any thread
has an error, and never replaces the ``.metadata`` of an earlier save, because a step directory is new.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from labkit.checkpoint.data.hashed_file import HashedFile
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.errors import CheckpointError, CheckpointFormatError, CheckpointWriteError
from labkit.checkpoint.files.plain_tensors import to_cpu
from labkit.checkpoint.formats.dcp_format import METADATA_FILE, read_dcp
from labkit.checkpoint.formats.dcp_versions import dump
from labkit.checkpoint.index.manifest import FileSum, check_file
from labkit.checkpoint.index.model import Checkpoint, Path_, ValueEntry
from labkit.checkpoint.pickles.values import digest

DCP_VERSION = "1.0.0"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value to save, as this rank sees it.

    Attributes:
        key: The flat name.
        path: The nested keys.
        shape, dtype: The full tensor's; None for a value that is not a tensor.
        shards: Offsets, sizes and data of this rank's part of a tensor.
        value: The value, if it is not a tensor.
        own: True if only this rank has the key (per-rank values); otherwise every rank has it, and one of them writes it.
    """

    key: str
    path: Path_
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    shards: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor], ...] = ()
    value: Any = None
    own: bool = False


class LeafPlanner(DefaultSavePlanner):
    """A planner for leaves that are already flat; global planning and its checks are DCP's.

    Args:
        leaves: This rank's leaves by key.
    """

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        # No plan caching: DCP's cache survives a change of dtype and then writes the old dtype into .metadata.
        super().__init__(flatten_state_dict=True, enable_plan_caching=False)
        self._leaves = leaves
        self._data: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        self.state_dict: dict[str, Any] = {}
        self.is_coordinator = is_coordinator
        self.mappings = {leaf.key: leaf.path for leaf in self._leaves.values()}

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for leaf in self._leaves.values():
            if leaf.shape is not None:
                items.extend(self._tensor_items(leaf))
            elif leaf.own or self.is_coordinator:
                items.append(WriteItem(MetadataIndex(leaf.key), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def _tensor_items(self, leaf: Leaf) -> Iterator[WriteItem]:
        assert leaf.shape is not None
        assert leaf.dtype is not None
        for offsets, sizes, data in leaf.shards:
            self._data[leaf.key, offsets] = data
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            written = TensorWriteData(chunk, TensorProperties(dtype=leaf.dtype), torch.Size(leaf.shape))
            yield WriteItem(MetadataIndex(leaf.key, offsets), WriteItemType.SHARD, tensor_data=written)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(self._leaves[index.fqn].value, buffer)
            return buffer
        assert index.offset is not None
        return self._data[index.fqn, tuple(index.offset)]


class DirectoryWriter(StorageWriter):
    """A writer of a DCP checkpoint into a new directory. It keeps the hash of every file of this rank, and can read them all back.

    Args:
        directory: An existing directory without a checkpoint in it.
        threads: Files that a rank writes at the same time.
        progress: Called with the number of bytes that were just written, from any thread.
    """

    def __init__(self, directory: Path, *, threads: int = 1, progress: Callable[[int], None] = lambda size_bytes: None) -> None:
        self.directory, self.threads, self._progress = directory, threads, progress
        self.sums: dict[str, FileSum] = {}
        self._values: dict[str, ValueEntry] = {}

    @property
    def checkpoint_id(self) -> Path:
        """The directory, for DCP's log."""
        return self.directory

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self.directory))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.sums, self._values = {}, {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        bins = [items for items in balanced(plan.items, self.threads) if items]
        names = [f"__{plan.storage_data}_{index}.distcp" for index in range(len(bins))]
        if len(bins) <= 1:
            written = [self._write_file(name, items, planner) for name, items in zip(names, bins, strict=True)]
        else:
            with ThreadPoolExecutor(len(bins), thread_name_prefix="labkit-checkpoint") as pool:
                # map() raises the first thread's error here, after all threads have ended.
                written = list(pool.map(lambda job: self._write_file(job[0], job[1], planner), zip(names, bins, strict=True)))
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in written for result in results])
        return future

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        with HashedFile(self.directory / name) as file:
            for item in items:
                start = file.tell()
                write_item(file, planner.resolve_data(item))
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
                if item.type == WriteItemType.BYTE_IO:
                    key = item.index.fqn
                    self._values[key] = ValueEntry(key, (key,), name, start, length)
                self._progress(length)
        self.sums[name] = file.total()
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        self.sums[METADATA_FILE] = write_metadata(self.directory, metadata)

    def read_back(self, leaves: Mapping[str, Leaf], progress: Callable[[int], None]) -> None:
        """Read back what this rank wrote: compare each file on disk with its hash, and each value with its leaf.

        Args:
            leaves: The leaves that were to be written, by key.
            progress: Called with the number of bytes that were just read.

        Raises:
            CheckpointWriteError: A file, a value or the index does not read back as it was written.

        Ranks: local.
        """
        for name, expected in self.sums.items():
            with _written(self.directory / name):
                check_file(self.directory, name, expected, from_disk=True)
            progress(expected.size)
        if METADATA_FILE in self.sums:
            with _written(self.directory / METADATA_FILE):
                read_dcp(self.directory)
        with Reader(Checkpoint(self.directory, self.directory, "dcp", values=self._values)) as reader:
            for key, entry in self._values.items():
                with _written(self.directory / entry.file):
                    if digest(reader.value(key)) != digest(leaves[key].value):
                        raise CheckpointFormatError(self.directory / entry.file, f"{key!r} comes back as another value")


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointWriteError(path, f"what was just written does not read back ({error})") from None


def write_item(file: HashedFile, data: torch.Tensor | io.BytesIO) -> None:
    """Append one item the way DCP does: a torch.save archive."""
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
    else:
        torch.save(to_cpu(data, copy=False), cast(IO[bytes], file))


def write_metadata(directory: Path, metadata: Metadata, fields: int | None = None) -> FileSum:
    """Write ``.metadata`` to disk and then rename it; ``fields`` as for :func:`labkit.checkpoint.formats.dcp_versions.dump`."""
    temporary = directory / (METADATA_FILE + ".tmp")
    with HashedFile(temporary) as file:
        dump(metadata, cast(IO[bytes], file), fields)
    temporary.rename(directory / METADATA_FILE)
    return file.total()


def item_bytes(item: WriteItem) -> int:
    """Return the bytes of a plan item's data; 1 for a value, whose size is not known yet."""
    if item.tensor_data is None:
        return 1
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def balanced(items: Sequence[WriteItem], bins: int) -> list[list[WriteItem]]:
    """Distribute items over files so that the files are about equally large."""
    if bins <= 1:
        return [list(items)]
    result: list[list[WriteItem]] = [[] for _ in range(bins)]
    loads = [0] * bins
    for item in sorted(items, key=item_bytes, reverse=True):
        index = loads.index(min(loads))
        result[index].append(item)
        loads[index] += item_bytes(item)
    return result
