"""Computation of a plan in this process: simulate a few ranks, then sum up over all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from labkit.plan import private
from labkit.plan.checkpoint import plan_checkpoint
from labkit.plan.held_boxes import Int64s, held_elements
from labkit.plan.job import mesh_of
from labkit.plan.records import CheckpointPlan, Plan, RankPlan, TrainingJob
from labkit.plan.simulate import MOVING, Simulation, simulate
from labkit.plan.traffic import traffic_of
from labkit.spmd.shards.layouts import MeshRecord


def compute_plan(job: TrainingJob) -> Plan:
    """Compute the plan of a job.

    Rank 0 is simulated first. Its layouts show which ranks hold the most and the least; these two are simulated next, along with
    the ranks that the job names.

    Raises:
        JobError: The job cannot be planned.
        AssertionError: This torch is not as expected, see `labkit.plan.private.self_test`.

    Ranks: local, in a process of its own: it makes a default process group and destroys it.
    """
    mesh = mesh_of(job)
    private.self_test()
    seconds: dict[str, float] = {}
    with _timed(seconds, "rank 0"):
        first = simulate(job, mesh, 0)
        elements = held_elements(list(first.parameters.values()), mesh)
    wanted = list(dict.fromkeys([int(elements.argmax()), int(elements.argmin()), *job.ranks]))
    with _timed(seconds, "other ranks"):
        simulations = {rank: first if rank == 0 else simulate(job, mesh, rank) for rank in wanted}
    _check_same_collectives(first, list(simulations.values()))
    with _timed(seconds, "checkpoint"):
        others = [simulation for rank, simulation in simulations.items() if rank != 0]
        checkpoint = None if job.checkpoint == "nothing" else plan_checkpoint(job, mesh, [first, *others])
    return Plan(
        mesh,
        job.ranks_per_node,
        sum(layout.numel for layout in first.parameters.values()),
        tuple(_rank_plan(simulation, mesh, elements, job.ranks_per_node) for simulation in simulations.values()),
        int((elements == 0).sum()),
        traffic_of(first.collectives, mesh, job.ranks_per_node),
        checkpoint,
        tuple(_notes(job, mesh, elements, checkpoint)),
        {name: round(value, 3) for name, value in seconds.items()},
        torch.__version__,
    )


def _rank_plan(simulation: Simulation, mesh: MeshRecord, elements: Int64s, ranks_per_node: int) -> RankPlan:
    rank = simulation.rank
    coordinate = tuple(int(place) for place in np.unravel_index(rank, mesh.shape))
    return RankPlan(
        rank,
        coordinate,
        rank // ranks_per_node,
        int(elements[rank]),
        simulation.memory,
        simulation.host_bytes,
        simulation.peak,
    )


def _check_same_collectives(first: Simulation, others: Sequence[Simulation]) -> None:
    for other in others:
        assert other.collectives == first.collectives, f"ranks 0 and {other.rank} call different collectives"


def _notes(job: TrainingJob, mesh: MeshRecord, elements: Int64s, checkpoint: CheckpointPlan | None) -> Iterator[str]:
    if job.peak and job.activations in MOVING:
        yield "no peak: torch's tracker does not see that activations leave the device. Their bytes on the device do not need it."
    idle = int((elements == 0).sum())
    if idle:
        yield (
            f"{idle:,} of {len(mesh.ranks):,} ranks hold no element of any parameter: no dim 0 is long enough for {job.mesh}. They "
            "take part in every collective and hold padding. Shard over fewer ranks."
        )
    if job.ranks_per_node < len(mesh.ranks) and len(mesh.ranks) % job.ranks_per_node:
        yield f"{len(mesh.ranks):,} ranks do not fill nodes of {job.ranks_per_node}: the last node has fewer."
    if checkpoint is not None and not checkpoint.exact:
        yield (
            f"the checkpoint's planner ran over some tensors of each layout and not over all {checkpoint.num_items:,} items, so "
            "its time and the size of .metadata are extrapolated"
        )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began_s
