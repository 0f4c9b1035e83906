"""Simulation of one training step as one rank on its own: torch's FSDP2 and tensor parallelism on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from labkit.plan import private
from labkit.plan.held_boxes import Layout
from labkit.plan.job import TP_AXIS, blocks_of, build_model, dtype_of, loss_of, mixed_precision_of, optimizer_of, tp_plan_of
from labkit.plan.records import JobError, TrainingJob
from labkit.spmd.memory.kinds import held_memory, tracked_peak
from labkit.spmd.offload.saved import WatchedOffload, watch_saved
from labkit.spmd.shards.layouts import MeshRecord
from labkit.spmd.shards.records import MemoryParts
from labkit.spmd.shards.sharding import ShardingError, shard_model
from labkit.spmd.shards.tensor_parallel import ParallelPlanError, check_plan
from labkit.spmd.trace.collectives import count_collectives
from labkit.spmd.trace.events import Collective

MOVING = ("move", "move-inputs")
RECOMPUTING = ("recompute", "move-inputs")


@dataclass(frozen=True)
class Simulation:
    """The results of one rank's step.

    Attributes:
        rank: The rank.
        memory: As in `labkit.plan.RankPlan`.
        host_bytes: Bytes of activations on the host.
        peak: The peak, if the job asked for it.
        collectives: The step's collectives in order, each with the name of its mesh axis in ``group``.
        parameters: The layout of each parameter on the mesh, by name; tied parameters only once.
        state: The layout of each entry to save, by its name in the checkpoint; None for an entry that is not a tensor.
        values: The entries that are not tensors, by name in the checkpoint.
        local_plan: The items that this rank proposes to write.
    """

    rank: int
    memory: MemoryParts
    host_bytes: int
    peak: MemoryParts | None
    collectives: tuple[Collective, ...]
    parameters: Mapping[str, Layout]
    state: Mapping[str, Layout | None]
    values: Mapping[str, Any]
    local_plan: SavePlan


def simulate(job: TrainingJob, mesh: MeshRecord, rank: int) -> Simulation:
    """Run one step of the job as one of its ranks.

    Raises:
        JobError: The model cannot be built, sharded or run as the job requires.

    Ranks: local, in a process without a default group.
    """
    with private.fake_world(rank, len(mesh.ranks)), private.few_chunks():
        device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axes)
        model, blocks = _sharded(job, device_mesh)
        with private.without_data():
            _materialize(model)
            return _step(job, device_mesh, rank, model, blocks)


def _sharded(job: TrainingJob, mesh: DeviceMesh) -> tuple[nn.Module, list[nn.Module]]:
    model = build_model(job)
    blocks = blocks_of(job, model)
    axes = mesh.mesh_dim_names or ()
    try:
        if TP_AXIS in axes and mesh[TP_AXIS].size() > 1:
            plan = tp_plan_of(job)
            check_plan(model, plan, mesh[TP_AXIS].size())
            parallelize_module(model, mesh[TP_AXIS], dict(plan))
        if job.activations in RECOMPUTING:
            from torch.distributed._composable import checkpoint

            for block in blocks:
                checkpoint(block)
        data_axes = tuple(axis for axis in axes if axis != TP_AXIS)
        shard_model(
            model,
            mesh[data_axes],
            blocks=set(blocks).__contains__,
            reshard_after_forward=job.reshard_after_forward,
            mp_policy=mixed_precision_of(job),
        )
    except (ParallelPlanError, ShardingError) as error:
        raise JobError(f"{error}\nChoose another size for an axis of the mesh {job.mesh!r}, or change the plan.") from error
    return model, blocks


@torch.no_grad()
def _materialize(model: nn.Module) -> None:
    """Give every parameter and buffer on meta a storage, shared by tied ones; ``to_empty`` would untie them."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = (tensor, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
                held[name] = made[id(tensor)][1]  # type: ignore[assignment]


def _step(job: TrainingJob, mesh: DeviceMesh, rank: int, model: nn.Module, blocks: list[nn.Module]) -> Simulation:
    moving = job.activations in MOVING
    offload = WatchedOffload(blocks, min_bytes=job.move_min_bytes) if moving else None
    optimizer, loss_function = optimizer_of(job, model), loss_of(job)
    batch = torch.zeros(job.batch, dtype=dtype_of(job.batch_dtype))
    parameters = {name: Layout.of(parameter) for name, parameter in model.named_parameters()}
    with count_collectives() as log:
        with watch_saved() as saved:
            if offload is not None:
                offload.saved = saved
            loss = _loss(loss_function, model, batch, job)
        kept_bytes = saved.size_bytes(model)
        del saved
        loss.backward()
        _optimize(optimizer, job)
    memory = replace(held_memory(model, optimizer), activations=kept_bytes)
    host_bytes = offload.counts.moved_bytes if offload is not None else 0
    state, local_plan = _local_plan(job, model, optimizer, rank)
    return Simulation(
        rank,
        memory,
        host_bytes,
        _peak(job, model, optimizer, batch) if job.peak and not moving else None,
        tuple(replace(call, group=_axis(mesh, call.group), began_s=0.0, duration_s=0.0) for call in log.calls),
        parameters,
        {name: Layout.of(value) if isinstance(value, Tensor) else None for name, value in state.items()},
        {name: value for name, value in state.items() if not isinstance(value, Tensor)},
        local_plan,
    )


def _loss(function: Any, model: nn.Module, batch: Tensor, job: TrainingJob) -> Tensor:
    try:
        loss = function(model, batch)
    except Exception as error:
        raise JobError(
            f"the loss of a batch {tuple(batch.shape)} of {job.batch_dtype} cannot be computed: {type(error).__name__}: {error}. "
            "Give the shape and dtype of one rank's batch (--batch) and the function of model and batch that computes it (--loss)."
        ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise JobError("the loss function must return a tensor of one element that depends on the parameters (--loss)")
    return loss


def _optimize(optimizer: torch.optim.Optimizer | None, job: TrainingJob) -> None:
    try:
        if optimizer is not None:
            optimizer.step()
    except Exception as error:
        raise JobError(
            f"the optimizer {type(optimizer).__name__} cannot take a step: {type(error).__name__}: {error}. Choose "
            f"one other than {job.optimizer!r} (--optimizer)."
        ) from error


def _peak(job: TrainingJob, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Tensor) -> MemoryParts:
    made = optimizer or torch.optim.SGD(model.parameters())

    def step() -> None:
        loss_of(job)(model, batch).backward()
        if optimizer is not None:
            optimizer.step()

    made.zero_grad()
    return tracked_peak(model, made, (batch,), step)


def _local_plan(
    job: TrainingJob, model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int
) -> tuple[dict[str, Any], SavePlan]:
    """Return the flat state dict of model and optimizer, and the plan that ``dcp.save`` makes for it on this rank."""
    if job.checkpoint == "nothing":
        return {}, SavePlan([])
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if job.checkpoint == "model+optimizer" and optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=rank == 0)
    # The planner computes offsets in small tensors and reads their values, so it needs real tensors.
    with private.with_data():
        return dict(planner.state_dict), planner.create_local_plan()


def _axis(mesh: DeviceMesh, group: str) -> str:
    """Return the mesh axis that a process group belongs to or, if it belongs to none, all axes joined by ``+``."""
    for axis in mesh.mesh_dim_names or ():
        if mesh.get_group(axis).group_name == group:
            return axis
    return "+".join(mesh.mesh_dim_names or ())
