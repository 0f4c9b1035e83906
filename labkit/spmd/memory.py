"""The memory of a training step, taken apart: by formula, by torch's tracker, and as measured by the allocator."""

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

from labkit.spmd.records import PARTS, MemoryParts

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
    """The formula: everything but the activations is divided by the number of ranks that shard it.

    Args:
        num_parameters: Of the whole model, a shared one counted once.
        world_size: Ranks that share parameters, gradients and optimizer state (ZeRO stage 3, which FSDP is).
        bytes_each: Of a parameter, of its gradient and of each moment.
        num_moments: Moments that the optimizer keeps: 2 for Adam, 1 for momentum, 0 for plain SGD.
        activation_bytes: On one rank; they depend on its batch and not on the number of ranks.

    Returns:
        Bytes per rank at the end of backward, when all gradients exist; ``activations`` as they were at its beginning.
        Padding of uneven shards, step counters and temporary memory are not in it.

    Ranks: local.
    """
    share = num_parameters * bytes_each // world_size
    return MemoryParts(share, share, share * num_moments, activation_bytes)


def held_memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryParts:
    """What the model and its optimizer hold on this rank right now; storages that are shared count once.

    Ranks: local.
    """
    parameters = [*model.parameters(), *model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    states = optimizer.state.values() if optimizer else ()
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return MemoryParts(storage_bytes(parameters), storage_bytes(gradients), storage_bytes(moments))


def storage_bytes(tensors: list[Any]) -> int:
    """Bytes of the storages behind some tensors, each once; of a DTensor, this rank's part."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())


def tracked_peak(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple[Tensor, ...], step: Callable[[], object]
) -> MemoryParts:
    """The peak of a step by ``FSDPMemTracker`` (torch.distributed._tools): it follows every tensor, on any device.

    It works without running anything real, too, under ``FakeTensorMode``; then it predicts.

    Args:
        model: A model whose root is sharded by FSDP2.
        optimizer: With state, or the step makes it and it counts as temporary.
        inputs: What the step feeds to the model.
        step: Forward, backward and optimizer step.

    Ranks: collective where ``step`` is.
    """
    # The one place that knows this private module; tests/unit/test_memory.py tries it.
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(inputs)
    with tracker:
        step()
    return tracked_parts(tracker.get_tracker_snapshot("peak"), model)


def measured_peak(step: Callable[[], object], device: torch.device, held: int = 0) -> int:
    """The most bytes that a step takes: what it holds when it begins, and what the allocator gives out on top of that.

    On CUDA the allocator's own statistics tell; on the CPU torch's profiler reports every allocation. What else this rank
    holds, such as another model, is not counted.

    Args:
        step: What to watch.
        device: Where it computes.
        held: Bytes that are held when the step begins, such as ``held_memory(...).total``.

    Ranks: local, or as ``step``.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return held + torch.cuda.max_memory_allocated(device) - before
    return held + max((total for _, total in allocation_curve(step)), default=0)


def allocation_curve(step: Callable[[], object]) -> list[tuple[int, int]]:
    """On the CPU: (nanoseconds of ``time.time_ns``, bytes allocated since the beginning) after every allocation of a step."""
    from torch.profiler import ProfilerActivity, profile

    # Without acc_events torch does not build Python objects of all events, which takes six times as long as a small step.
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _without_the_profilers_log(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # after one cycle, and there is one
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
    """The profiler's C++ side writes to stderr when it starts, stops, or sees memory go that it has not seen come."""
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


# The tracker's categories, as they are named since torch 2.6.
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
    """What a snapshot of torch's memory tracker says of the device that holds the model. Ranks: local."""
    first = next(model.parameters())
    device = (first.to_local() if isinstance(first, DTensor) else first).device
    parts = dict.fromkeys(PARTS, 0)
    # Adam's step counters live on the CPU, so a GPU is not the only device.
    for kind, size in snapshot[device].items():
        category = str(getattr(kind, "value", kind))
        if category != "Total":
            parts[_CATEGORIES[category]] += size
    return MemoryParts(**parts)
