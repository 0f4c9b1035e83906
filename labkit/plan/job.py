"""Conversion of the names in a job into the objects they refer to, with checks for jobs that cannot be planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from labkit.base.lookup import FunctionNotFoundError, find_function
from labkit.plan.records import MAX_RANKS, JobError, TrainingJob
from labkit.spmd.shards.layouts import DATA_AXES, MeshRecord, parse_mesh

REPLICATE_AXES = ("replicate", "dp_replicate")
TP_AXIS = "tp"
_COURSE_PLAN = "labkit.spmd.shards.tensor_parallel:tensor_parallel_plan"


def mesh_of(job: TrainingJob) -> MeshRecord:
    """Return the job's mesh.

    Raises:
        JobError: It cannot be parsed, has too many ranks, or has an axis over which labkit cannot lay out a model.
    """
    try:
        axes = parse_mesh(job.mesh)
    except ValueError as error:
        raise JobError(str(error)) from None
    names = list(axes)
    unknown = [name for name in names if name not in (*DATA_AXES, *REPLICATE_AXES, TP_AXIS)]
    if unknown:
        raise JobError(
            f"the mesh {job.mesh!r} has an axis {unknown[0]!r}, which cannot be planned. FSDP shards over one of "
            f"{', '.join(DATA_AXES)}; HSDP has replicate outside of it; tensor parallelism is tp, innermost."
        )
    # replicate, then FSDP's axis, then tp, each at most once; FSDP's axis is required.
    places = [0 if name in REPLICATE_AXES else 1 if name in DATA_AXES else 2 for name in names]
    if places != sorted(set(places)) or 1 not in places:
        raise JobError(
            f"the mesh {job.mesh!r} cannot be planned. It needs one axis that FSDP shards over ({', '.join(DATA_AXES)}); before it "
            "there may be one called replicate, after it one called tp."
        )
    num_ranks = prod(axes.values())
    if num_ranks > MAX_RANKS:
        raise JobError(f"the mesh {job.mesh!r} has {num_ranks:,} ranks. Plans are made for up to {MAX_RANKS:,}.")
    if job.ranks_per_node < 1:
        raise JobError(f"a node needs at least one rank, not {job.ranks_per_node}")
    strays = [rank for rank in job.ranks if not 0 <= rank < num_ranks]
    if strays:
        raise JobError(f"rank {strays[0]} is not on the mesh {job.mesh!r}, whose ranks are 0 to {num_ranks - 1}")
    return MeshRecord(tuple(names), tuple(axes.values()), tuple(range(num_ranks)))


def build_model(job: TrainingJob) -> nn.Module:
    """Build the whole model on the meta device.

    Raises:
        JobError: It cannot be built there, or the result is not a module.
    """
    builder = _function(job.model, "model")
    try:
        with torch.device("meta"):
            model = builder()
    except Exception as error:
        raise JobError(
            f"{_name(job.model)} cannot build the model on the meta device: {type(error).__name__}: {error}. Build it without "
            "reading values and without loading weights; names, shapes and dtypes are enough for a plan."
        ) from error
    if not isinstance(model, nn.Module):
        raise JobError(f"{_name(job.model)} returned {type(model).__name__}, not a torch.nn.Module")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    elsewhere = [name for name, tensor in tensors.items() if not tensor.is_meta]
    if elsewhere:
        raise JobError(
            f"{_name(job.model)} puts {elsewhere[0]} on {tensors[elsewhere[0]].device} and not on meta, which takes memory. "
            "Leave out device=... in the model, or let the function take it from torch.get_default_device()."
        )
    return model if job.dtype is None else model.to(dtype_of(job.dtype))


def blocks_of(job: TrainingJob, model: nn.Module) -> list[nn.Module]:
    """Return the modules that are sharded separately and whose activations are kept, recomputed or moved.

    Raises:
        JobError: The model has no module of a class that the job names, or the job names none and the model has no ``ModuleList``.
    """
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if job.blocks:
        missing = [name for name in job.blocks if name not in classes]
        if missing:
            raise JobError(f"the model has no module of class {missing[0]!r}. Its classes: {', '.join(sorted(classes))}.")
        return [module for module in model.modules() if type(module).__name__ in job.blocks]
    found: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            found |= dict.fromkeys(module)
            inside.update(module.modules())
    if not found:
        raise JobError(
            "the model has no ModuleList, so it is not clear which modules fully_shard shards by themselves. Name their classes "
            f"(--blocks). The model's classes: {', '.join(sorted(classes))}."
        )
    return list(found)


def tp_plan_of(job: TrainingJob) -> Mapping[str, ParallelStyle]:
    """Return the plan for tensor parallelism.

    Raises:
        JobError: The job names no plan.
    """
    if job.tp_plan is None:
        raise JobError(
            f"the mesh {job.mesh!r} has an axis tp, but nothing says how tensor parallelism cuts the model. Name a function that "
            f"returns the plan for parallelize_module (--tp-plan); for the course's model it is {_COURSE_PLAN}."
        )
    plan: Mapping[str, ParallelStyle] = _function(job.tp_plan, "tp_plan")()
    return plan


def loss_of(job: TrainingJob) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return the function that computes the loss from model and batch."""
    return _function(job.loss, "loss")


def optimizer_of(job: TrainingJob, model: nn.Module) -> torch.optim.Optimizer | None:
    """Build the optimizer over a model's current parameters.

    Raises:
        JobError: There is no optimizer of this name, or it cannot be built with its defaults.
    """
    if job.optimizer is None:
        return None
    by_name = getattr(torch.optim, job.optimizer, None) if isinstance(job.optimizer, str) else None
    if isinstance(job.optimizer, str) and by_name is None and ":" not in job.optimizer:
        raise JobError(f"torch.optim has no {job.optimizer!r}. Name one of its classes, such as AdamW or SGD, or MODULE:FUNCTION.")
    make = by_name or _function(job.optimizer, "optimizer")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        made = make(trained)
    except Exception as error:
        raise JobError(f"the optimizer {_name(job.optimizer)} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise JobError(f"{_name(job.optimizer)} returned {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def mixed_precision_of(job: TrainingJob) -> MixedPrecisionPolicy:
    """Return the mixed-precision policy for ``fully_shard``."""
    param, reduce = (None if text is None else dtype_of(text) for text in (job.param_dtype, job.reduce_dtype))
    return MixedPrecisionPolicy(param, reduce)


def dtype_of(text: str) -> torch.dtype:
    """Return the dtype named by a text such as ``bfloat16``.

    Raises:
        JobError: There is no such dtype.
    """
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise JobError(f"torch has no dtype {text!r}. Write it like bfloat16, float32 or int64.")
    return found


def _function(given: str | Callable[..., Any], what: str) -> Callable[..., Any]:
    if not isinstance(given, str):
        return given
    try:
        return find_function(given)
    except FunctionNotFoundError as error:
        raise JobError(f"{what}: {error}") from error


def _name(given: str | Callable[..., Any]) -> str:
    return given if isinstance(given, str) else getattr(given, "__name__", repr(given))
