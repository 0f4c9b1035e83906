"""Planning of all ranks' checkpoint with DCP's own planner, from one rank's local plan and its tensors' layouts.

Ranks' local plans differ only in the boxes of their tensors. So all plans are derived from one, and the planner processes them as
it would on the coordinator. If that would take too long, it plans one tensor of each layout, then two, and the results are
extrapolated: files, metadata and the planner handle tensors one by one, so each further tensor adds the same amount.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from labkit.checkpoint.index.layout import Box
from labkit.plan import private
from labkit.plan.held_boxes import Layout
from labkit.plan.records import CheckpointPlan, TrainingJob
from labkit.plan.simulate import Simulation
from labkit.spmd.shards.layouts import MeshRecord

# Above either limit, the planner runs over only some tensors. At a limit, planning takes a few seconds.
MAX_ITEMS, MAX_PAIRS = 150_000, 2_000_000


def plan_checkpoint(job: TrainingJob, mesh: MeshRecord, simulations: Sequence[Simulation]) -> CheckpointPlan:
    """Plan the files that ``dcp.save`` writes on all ranks.

    Args:
        job: The job.
        mesh: The mesh of all ranks.
        simulations: Simulations of some ranks, beginning with the coordinator (rank 0). The plans derived for these ranks are
            compared with the simulated ones.

    Raises:
        AssertionError: A simulated rank made a different plan, so labkit's arithmetic does not match this torch.

    Ranks: local. Runs the planner over all items if there are at most `MAX_ITEMS`, with at most `MAX_PAIRS` pairs of shards to
    compare.
    """
    proposals = _Proposals(simulations[0], mesh)
    for simulation in simulations:
        proposals.check(simulation)
    num_items = len(proposals.first.items) * len(mesh.ranks)
    if num_items > MAX_ITEMS or proposals.num_pairs() > MAX_PAIRS:
        return _extrapolated(job, proposals, num_items)
    return _planned(job, proposals, num_items)


class _Proposals:
    """The local plans that all ranks propose."""

    def __init__(self, first: Simulation, mesh: MeshRecord) -> None:
        self.mesh, self.layouts, self.values = mesh, first.state, first.values
        # Plans reach the coordinator pickled: objects shared within one rank's plan stay shared, but different ranks share none.
        # The metadata take objects from the first and last rank, and from others only what those two lack, so three copies suffice.
        raw = pickle.dumps(first.local_plan)
        self.first, self.last, self._others = (_Template(pickle.loads(raw)) for _ in range(3))
        self._boxes: dict[Layout, tuple[list[Box], list[int]]] = {}

    def boxes(self, name: str) -> tuple[list[Box], list[int]] | None:
        """Return a tensor's boxes and each rank's index into them; None if all ranks propose the same box."""
        layout = self.layouts[name]
        if layout is None or not layout.axes:
            return None
        if layout not in self._boxes:
            self._boxes[layout] = _listed(layout, self.mesh)
        return self._boxes[layout]

    def num_pairs(self) -> int:
        """Estimate how many pairs of shards the planner compares, see `labkit.plan.private.checking_seconds`."""
        by_layout: dict[Layout | None, int] = {}
        for name in self.first.items:
            layout, found = self.layouts[name], self.boxes(name)
            if layout not in by_layout and layout is not None and found is not None:
                longest = max(range(len(layout.shape)), key=layout.shape.__getitem__)
                by_layout[layout] = len(found[0]) ** 2 // (2 * len({offsets[longest] for offsets, _ in found[0]}))
        return sum(by_layout.get(self.layouts[name], 0) for name in self.first.items)

    def of_all(self, names: Sequence[str]) -> list[SavePlan]:
        """Return the local plans of all ranks for some tensors."""
        columns: list[list[WriteItem]] = []
        for name in names:
            item, found = self._others.items[name], self.boxes(name)
            if found is None:
                columns.append([item] * len(self.mesh.ranks))
            else:
                items = [_with_box(item, box) for box in found[0]]
                columns.append([items[index] for index in found[1]])
        plans = [SavePlan(list(row), planner_data=self._others.paths) for row in zip(*columns, strict=True)]
        plans = plans or [SavePlan([], planner_data=self._others.paths)] * len(self.mesh.ranks)
        plans[-1] = self._of(self.last, names, len(plans) - 1)
        plans[0] = self._of(self.first, names, 0)
        return plans

    def _of(self, template: _Template, names: Sequence[str], rank: int) -> SavePlan:
        """Return one rank's plan, which shares no items with other ranks' plans."""
        found = [(template.items[name], self.boxes(name)) for name in names]
        items = [item if boxes is None else _with_box(item, boxes[0][boxes[1][rank]]) for item, boxes in found]
        return SavePlan(items, planner_data=template.paths)

    def check(self, simulation: Simulation) -> None:
        """Compare the plan derived for a rank with the one from its simulation."""
        names = list(self.first.items)
        planned = simulation.local_plan.items
        assert [item.index.fqn for item in planned] == names, f"rank {simulation.rank} saves other tensors than rank 0"
        for made_up, item in zip(self._of(self.first, names, simulation.rank).items, planned, strict=True):
            assert made_up == item, f"rank {simulation.rank}: derived {made_up}, planned {item}"


def _listed(layout: Layout, mesh: MeshRecord) -> tuple[list[Box], list[int]]:
    boxes, which = layout.boxes(mesh)
    return boxes, which.tolist()


class _Template:
    """A local plan from which other ranks' plans are derived."""

    def __init__(self, plan: SavePlan) -> None:
        self.items = {item.index.fqn: item for item in plan.items}
        self.paths = plan.planner_data


def _with_box(item: WriteItem, box: Box) -> WriteItem:
    offsets, sizes = torch.Size(box[0]), torch.Size(box[1])
    assert item.tensor_data is not None
    data = replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, sizes))
    return WriteItem(MetadataIndex(item.index.fqn, offsets), item.type, tensor_data=data)


def _planned(job: TrainingJob, proposals: _Proposals, num_items: int) -> CheckpointPlan:
    plans, planner = proposals.of_all(list(proposals.first.items)), DefaultSavePlanner()
    began_s = time.process_time()
    global_plans, metadata = planner.create_global_plan(plans)
    planning_s = time.process_time() - began_s
    files, metadata_bytes = _written(job, proposals, global_plans, metadata)
    num_shards = sum(len(plan.items) for plan in global_plans)
    return CheckpointPlan(
        _tensor_bytes(proposals),
        sum(files),
        len(files),
        files.count(0),
        max(files),
        num_shards,
        num_items,
        metadata_bytes,
        planning_s,
        exact=True,
    )


def _extrapolated(job: TrainingJob, proposals: _Proposals, num_items: int) -> CheckpointPlan:
    alike: dict[Any, list[str]] = {}
    for name in proposals.first.items:
        alike.setdefault(proposals.layouts[name] or type(proposals.values[name]), []).append(name)
    began_s = time.process_time()
    # Even for plans without items, the planner merges the ranks' names.
    global_plans, metadata = DefaultSavePlanner().create_global_plan(proposals.of_all([]))
    planning_s = time.process_time() - began_s
    _, empty_bytes = _written(job, proposals, global_plans, metadata)
    num_shards, file_bytes, metadata_bytes = 0, 0, empty_bytes
    for group in alike.values():
        one, two = (_outcome(job, proposals, group[:count]) for count in (1, 2))
        planning_s += len(group) * (two.planning_s / len(group[:2]) + one.checking_s)
        num_shards += len(group) * one.num_shards
        file_bytes += len(group) * one.file_bytes
        # Only the first tensor adds names of files and classes.
        metadata_bytes += one.metadata_bytes - empty_bytes + (len(group) - 1) * (two.metadata_bytes - one.metadata_bytes)
    return CheckpointPlan(
        _tensor_bytes(proposals),
        file_bytes,
        len(proposals.mesh.ranks) * job.checkpoint_threads,
        None,
        None,
        num_shards,
        num_items,
        metadata_bytes,
        planning_s,
        exact=False,
    )


@dataclass(frozen=True)
class _Outcome:
    """The result of planning and writing some tensors. ``checking_s`` is how long the planner takes to check the plan."""

    planning_s: float
    checking_s: float
    num_shards: int
    file_bytes: int
    metadata_bytes: int


def _outcome(job: TrainingJob, proposals: _Proposals, names: Sequence[str]) -> _Outcome:
    plans = proposals.of_all(names)
    began_s = time.process_time()
    global_plans, metadata = private.unchecked_global_plan(plans)
    planning_s = time.process_time() - began_s
    checking_s = private.checking_seconds(metadata) if len(names) == 1 else 0.0
    files, metadata_bytes = _written(job, proposals, global_plans, metadata)
    return _Outcome(planning_s, checking_s, sum(len(plan.items) for plan in global_plans), sum(files), metadata_bytes)


def _written(job: TrainingJob, proposals: _Proposals, plans: Sequence[SavePlan], metadata: Metadata) -> tuple[list[int], int]:
    """Return the sizes of the files that the ranks write, and the size of ``.metadata``."""
    files, results = [], []
    for rank, plan in enumerate(plans):
        sizes, written = _write(rank, plan, proposals.values, job.checkpoint_threads)
        files += sizes
        # Each rank's results reach the coordinator pickled, so ranks share no strings.
        results.append(pickle.loads(pickle.dumps(written)))
    return files, private.metadata_bytes(metadata, results, job.checkpoint_dir)


def _write(rank: int, plan: SavePlan, values: Mapping[str, Any], threads: int) -> tuple[list[int], list[Any]]:
    """Return the sizes of a rank's files, and the results that it reports for its items."""
    sizes, results = [], []
    for place, items in enumerate(private.files_of(plan.items, threads)):
        file, start = f"__{rank}_{place}.distcp", 0
        for item in sorted(items, key=lambda item: item.tensor_data is not None):  # values come first
            length = _value_bytes(values[item.index.fqn]) if item.tensor_data is None else _item_bytes(item)
            results.append(private.written(item, file, start, length))
            start += length
        sizes.append(start)
    return sizes, results


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    assert item.tensor_data.chunk is not None
    return _archive_bytes(tuple(item.tensor_data.chunk.sizes), item.tensor_data.properties.dtype)


class _Counter(io.RawIOBase):
    """A file that only counts the bytes written to it."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.size_bytes += size
        return size


@cache
def _archive_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the size of a shard saved by ``torch.save``. The shard's memory is never touched, so the system never provides it."""
    return _saved_bytes(torch.empty(shape, dtype=dtype))


def _value_bytes(value: Any) -> int:
    return _saved_bytes(value)


def _saved_bytes(value: Any) -> int:
    counter, checksum = _Counter(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)  # only the checksum would read the data
    try:
        torch.save(value, counter)  # type: ignore[arg-type]
    finally:
        torch.serialization.set_crc32_options(checksum)
    return counter.size_bytes


def _tensor_bytes(proposals: _Proposals) -> int:
    layouts = [layout for name in proposals.first.items if (layout := proposals.layouts[name]) is not None]
    return sum(prod(layout.shape) * layout.dtype.itemsize for layout in layouts)
