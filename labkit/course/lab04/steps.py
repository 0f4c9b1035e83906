"""Training steps of small sharded models, recorded on the ranks: what the checks of notebook 04 compare answers with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from labkit.course.checks import Pool, from_cell

if TYPE_CHECKING:
    from torch import nn

    from labkit.spmd.events import Trace
    from labkit.spmd.model import Transformer

T = TypeVar("T")

_measured: dict[tuple[str, int, str], Any] = {}


@dataclass(frozen=True)
class StepCase:
    """How a model is sharded and how a step is taken.

    Attributes:
        num_blocks: Blocks below the root.
        reshard: Whether the blocks are freed after forward.
        prefetch: Whether backward gathers the next block early.
        num_micro: Micro-batches of the step.
        sync_each: Whether gradients are reduced after each micro-batch, or after the last only.
        keep: Whether parameters stay whole after the backward of each micro-batch but the last.
    """

    num_blocks: int
    reshard: bool
    prefetch: bool = True
    num_micro: int = 1
    sync_each: bool = True
    keep: bool = False


def measured_once(pool: Pool, function: Callable[[list[StepCase]], T], cases: list[StepCase], *, timeout_s: float) -> T:
    """What a function sees on the ranks, the same on all; measured by the first check of a session and remembered.

    The runtime does not change while somebody tries to solve an exercise, and the second attempt should be answered at once.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    key = (f"{function.__module__}.{function.__qualname__}", pool.world_size, pool.device)
    if key not in _measured:
        _measured[key] = pool.run(function, cases, timeout_s=timeout_s).same()
    found: T = _measured[key]
    return found


def sharded_model(num_blocks: int, reshard: bool, prefetch: bool = True) -> Transformer:
    """A small sharded transformer. Ranks: collective."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule

    from labkit.spmd import Block, ModelConfig, build_model, shard_model

    device = from_cell("device")
    config = ModelConfig(dim=16, num_layers=num_blocks, num_heads=2, hidden_dim=24, max_seq_len=16)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = shard_model(build_model(config, device=device), mesh, blocks=Block, reshard_after_forward=reshard)
    if not prefetch:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # An empty list means the default. A module that names itself names one that is whole already.
                module.set_modules_to_backward_prefetch([module])
    return model


def recorded_step(case: StepCase) -> Trace:
    """The events of one step, the first of a new model. Ranks: collective."""
    from labkit.spmd import record_events

    model = sharded_model(case.num_blocks, case.reshard, case.prefetch)
    with record_events(model) as recording:
        _step(model, case)
    return recording.trace()


def _step(model: nn.Module, case: StepCase) -> None:
    import torch

    from labkit.spmd import next_token_loss

    sharded: Any = model
    batch = torch.arange(2 * 9, device=from_cell("device")).view(2, 9)
    for number in range(case.num_micro):
        last = number == case.num_micro - 1
        sharded.set_requires_gradient_sync(case.sync_each or last)
        sharded.set_reshard_after_backward(last or not case.keep)
        next_token_loss(model, batch).backward()
