"""The memory of a training step by kind: from a formula, from torch's tracker, and as measured by the allocator."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.spmd.shards.records import PARTS, MemoryParts

__all__ = [
    "PARTS",
    "MemoryParts",
    "allocation_curve",
    "held_memory",
    "measured_peak",
    "predict_memory",
    "storage_bytes",
    "tracked_parts",
    "tracked_peak",
]


def predict_memory(
    num_parameters: int, *, world_size: int = 1, bytes_each: int = 4, num_moments: int = 2, activation_bytes: int = 0
) -> MemoryParts:
    """Predict memory by formula: everything but the activations is divided by the number of ranks.

    Args:
        num_parameters: Parameters of the whole model; a shared one counts once.
        world_size: Ranks over which parameters, gradients and optimizer state are sharded (ZeRO stage 3, as in FSDP).
        bytes_each: Bytes of one element of a parameter, of its gradient and of each moment.
        num_moments: Moments that the optimizer keeps: 2 for Adam, 1 for momentum, 0 for plain SGD.
        activation_bytes: Bytes on one rank, which depend on its batch, not on the number of ranks.

    Returns:
        Bytes per rank at the end of backward, when all gradients exist; only ``activations`` are as at the beginning of backward.
        Padding of uneven shards, step counters and temporary memory are not included.

    Ranks: local.
    """
    share = num_parameters * bytes_each // world_size
    return MemoryParts(share, share, share * num_moments, activation_bytes)


def held_memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryParts:
    """Return the memory that the model and its optimizer hold on this rank right now; shared storages count once.

    Ranks: local.
    """
    parameters = [*model.parameters(), *model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    states = optimizer.state.values() if optimizer else ()
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return MemoryParts(storage_bytes(parameters), storage_bytes(gradients), storage_bytes(moments))


def storage_bytes(tensors: list[Any]) -> int:
    """Return the bytes of the storages behind tensors, counting each storage once and, for a DTensor, only this rank's part."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())


def tracked_peak(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple[Tensor, ...], step: Callable[[], object]
) -> MemoryParts:
    """Return the peak of a step according to ``FSDPMemTracker`` (torch.distributed._tools), which follows every tensor.

    It works on any device, and also under ``FakeTensorMode``, where it predicts the peak without any real computation.

    Args:
        model: A model whose root is sharded by FSDP2.
        optimizer: The optimizer, with its state; otherwise the step creates the state, which then counts as temporary.
        inputs: The inputs that the step passes to the model.
        step: Forward, backward and optimizer step.

    Ranks: collective if ``step`` is.
    """
    # Only this function uses the private module; tests/unit/test_memory.py tests it.
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(inputs)
    with tracker:
        step()
    return tracked_parts(tracker.get_tracker_snapshot("peak"), model)


def measured_peak(step: Callable[[], object], device: torch.device, held: int = 0) -> int:
    """Return the peak bytes of a step: those held when it begins, plus the most that the allocator adds.

    On CUDA this comes from the allocator's statistics; on the CPU torch's profiler reports every allocation. Other memory of this
    rank, such as another model, is not counted.

    Args:
        step: The step to watch.
        device: The device that runs the step.
        held: Bytes held when the step begins, such as ``held_memory(...).total``.

    Ranks: as ``step``.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return held + torch.cuda.max_memory_allocated(device) - before
    return held + max((total for _, total in allocation_curve(step)), default=0)


def allocation_curve(step: Callable[[], object]) -> list[tuple[int, int]]:
    """Return (``time.time_ns``, bytes allocated since the beginning) after every CPU allocation in a step."""
    from torch.profiler import ProfilerActivity, profile

    # With acc_events, torch would build Python objects for all events, which takes six times as long as a small step.
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _without_the_profilers_log(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # after a cycle; there is only one
        with profiler:
            step()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    total, curve = 0, []
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            total += event.nbytes()
            curve.append((event.start_ns(), total))
    return curve


@contextmanager
def _without_the_profilers_log() -> Iterator[None]:
    """Drop the log lines that the profiler's C++ side writes to stderr while the block runs."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            log.seek(0)
            for line in log:
                if not any(source in line for source in (b"ProfilerHandler.cpp", b"CPUAllocator.cpp")):
                    os.write(kept, line)
            os.close(kept)


# The tracker's categories, by their names since torch 2.6.
_CATEGORIES: Mapping[str, str] = {
    "Sharded Param": "parameters",
    "Unsharded Param": "parameters",
    "Buffer": "parameters",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "OptState": "optimizer",
    "Activation": "activations",
    "Temp": "temporary",
    "All Gather": "temporary",
    "Reduce Scatter": "temporary",
    "Inputs": "temporary",
}


def tracked_parts(snapshot: Mapping[torch.device, Mapping[Any, int]], model: nn.Module) -> MemoryParts:
    """Sort a snapshot of torch's memory tracker into parts, for the device that holds the model. Ranks: local."""
    first = next(model.parameters())
    device = (first.to_local() if isinstance(first, DTensor) else first).device
    parts = dict.fromkeys(PARTS, 0)
    # Adam's step counters are on the CPU, so with a GPU there is more than one device.
    for kind, size in snapshot[device].items():
        category = str(getattr(kind, "value", kind))
        if category != "Total":
            parts[_CATEGORIES[category]] += size
    return MemoryParts(**parts)
