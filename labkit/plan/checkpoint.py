"""Plan a checkpoint of all ranks with DCP's own planner, from the local plan of one rank and the layouts of its tensors.

A rank's local plan differs from another's only in the boxes of its tensors. So every rank's plan is made from one, and the
planner goes through all of them as it does on a coordinator. It takes some microseconds for each item of each rank. Where that
would be too long it runs over one and two tensors of each layout: planner, metadata and files treat tensors one by one, so that
what one more adds can be multiplied.
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
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from labkit.checkpoint.layout import Box
from labkit.plan import private
from labkit.plan.layout import Layout
from labkit.plan.records import CheckpointPlan, TrainingJob
from labkit.plan.simulate import Simulation
from labkit.spmd.layouts import MeshRecord

MAX_ITEMS = 200_000


def plan_checkpoint(job: TrainingJob, mesh: MeshRecord, simulations: Sequence[Simulation]) -> CheckpointPlan:
    """Plan what ``dcp.save`` writes on all ranks.

    Args:
        job: The job.
        mesh: All ranks.
        simulations: Of some ranks, the coordinator's (rank 0) first. What is made up for their ranks is compared with what they
            planned.

    Raises:
        AssertionError: A simulated rank planned something else; labkit's arithmetic and this torch differ.

    Ranks: local. Takes some seconds for `MAX_ITEMS` items, and for the three tensors of each layout as long as for so many.
    """
    first = simulations[0]
    proposals = _Proposals(first, mesh)
    for simulation in simulations:
        proposals.check(simulation)
    items = {item.index.fqn: item for item in first.local_plan.items}
    num_items = len(items) * len(mesh.ranks)
    if num_items <= MAX_ITEMS:
        return _planned(job, proposals, list(items), first.values, num_items)
    return _extrapolated(job, proposals, list(items), first, num_items)


class _Proposals:
    """What every rank proposes to write."""

    def __init__(self, first: Simulation, mesh: MeshRecord) -> None:
        self.mesh, self.layouts = mesh, first.state
        # Plans reach the coordinator pickled: what is one object in a rank's plan stays one, and ranks share nothing. Metadata
        # take from the first rank and from the last, and from others what neither has, so three copies are as good as many.
        raw = pickle.dumps(first.local_plan)
        self.first, self.last, self._others = (_Template(pickle.loads(raw)) for _ in range(3))
        self._boxes: dict[Layout, tuple[list[Box], list[int]]] = {}

    def boxes(self, name: str) -> tuple[list[Box], list[int]] | None:
        """The boxes of a tensor and for each rank the index of its own; None where all ranks propose the same."""
        layout = self.layouts[name]
        if layout is None or not layout.axes:
            return None
        if layout not in self._boxes:
            boxes, which = layout.boxes(self.mesh)
            self._boxes[layout] = (boxes, which.tolist())
        return self._boxes[layout]

    def of_all(self, names: Sequence[str]) -> list[SavePlan]:
        """The local plans of all ranks, for some tensors."""
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
        """One rank's plan, none of whose items another rank has."""
        found = [(template.items[name], self.boxes(name)) for name in names]
        items = [item if boxes is None else _with_box(item, boxes[0][boxes[1][rank]]) for item, boxes in found]
        return SavePlan(items, planner_data=template.paths)

    def check(self, simulation: Simulation) -> None:
        """Compare what is made up for a rank with what it planned when it was simulated."""
        names = list(self.first.items)
        planned = simulation.local_plan.items
        assert [item.index.fqn for item in planned] == names, f"rank {simulation.rank} saves other tensors than rank 0"
        for made_up, item in zip(self._of(self.first, names, simulation.rank).items, planned, strict=True):
            assert made_up == item, f"rank {simulation.rank}: made up {made_up}, planned {item}"


class _Template:
    """A local plan, from which others are made."""

    def __init__(self, plan: SavePlan) -> None:
        self.items = {item.index.fqn: item for item in plan.items}
        self.paths = plan.planner_data


def _with_box(item: WriteItem, box: Box) -> WriteItem:
    offsets, sizes = torch.Size(box[0]), torch.Size(box[1])
    assert item.tensor_data is not None
    data = replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, sizes))
    return WriteItem(MetadataIndex(item.index.fqn, offsets), item.type, tensor_data=data)


@dataclass(frozen=True)
class _Outcome:
    """What planning and writing some tensors gives."""

    planning_s: float
    num_shards: int
    file_bytes: tuple[int, ...]
    metadata_bytes: int


def _planned(
    job: TrainingJob, proposals: _Proposals, names: Sequence[str], values: Mapping[str, Any], num_items: int
) -> CheckpointPlan:
    outcome = _run_planner(job, proposals, names, values)
    return CheckpointPlan(
        _tensor_bytes(proposals, names),
        sum(outcome.file_bytes),
        len(outcome.file_bytes),
        outcome.file_bytes.count(0),
        max(outcome.file_bytes),
        outcome.num_shards,
        num_items,
        outcome.metadata_bytes,
        outcome.planning_s,
        exact=True,
    )


def _extrapolated(
    job: TrainingJob, proposals: _Proposals, names: Sequence[str], first: Simulation, num_items: int
) -> CheckpointPlan:
    alike: dict[Any, list[str]] = {}
    for name in names:
        alike.setdefault(proposals.layouts[name] or type(first.values[name]), []).append(name)
    nothing = _run_planner(job, proposals, [], first.values)
    planning_s, num_shards, file_bytes, metadata_bytes = 0.0, 0, 0, nothing.metadata_bytes
    for group in alike.values():
        one = _run_planner(job, proposals, group[:1], first.values)
        # Only the first tensor brings the names of files and classes into the metadata.
        two = _run_planner(job, proposals, group[:2], first.values)
        planning_s += len(group) * two.planning_s / len(group[:2])
        num_shards += len(group) * one.num_shards
        file_bytes += len(group) * sum(one.file_bytes)
        metadata_bytes += one.metadata_bytes - nothing.metadata_bytes + (len(group) - 1) * (two.metadata_bytes - one.metadata_bytes)
    return CheckpointPlan(
        _tensor_bytes(proposals, names),
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


def _run_planner(job: TrainingJob, proposals: _Proposals, names: Sequence[str], values: Mapping[str, Any]) -> _Outcome:
    plans, planner = proposals.of_all(names), DefaultSavePlanner()
    began_s = time.perf_counter()
    global_plans, metadata = planner.create_global_plan(plans)
    planning_s = time.perf_counter() - began_s
    file_bytes, results = [], []
    for rank, plan in enumerate(global_plans):
        sizes, written = _write(rank, plan, values, job.checkpoint_threads)
        file_bytes += sizes
        # Each rank's results reach the coordinator pickled, so that no text is shared between ranks.
        results.append(pickle.loads(pickle.dumps(written)))
    size_bytes = private.metadata_bytes(metadata, results, job.checkpoint_dir)
    return _Outcome(planning_s, sum(len(plan.items) for plan in global_plans), tuple(file_bytes), size_bytes)


def _write(rank: int, plan: SavePlan, values: Mapping[str, Any], threads: int) -> tuple[list[int], list[Any]]:
    """The sizes of a rank's files, and what it reports of them."""
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
    """Counts what is written to it."""

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
    """The size of what ``torch.save`` makes of a shard. Its memory is never touched, so the system provides none."""
    return _saved_bytes(torch.empty(shape, dtype=dtype))


def _value_bytes(value: Any) -> int:
    return _saved_bytes(value)


def _saved_bytes(value: Any) -> int:
    counter, checksum = _Counter(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(compute_crc32=False)  # the only thing that would read the data
    try:
        torch.save(value, counter)  # type: ignore[arg-type]
    finally:
        torch.serialization.set_crc32_options(checksum)
    return counter.size_bytes


def _tensor_bytes(proposals: _Proposals, names: Sequence[str]) -> int:
    layouts = [layout for name in names if (layout := proposals.layouts[name]) is not None]
    return sum(prod(layout.shape) * layout.dtype.itemsize for layout in layouts)
