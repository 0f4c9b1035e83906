"""Training steps of small sharded models, recorded on the ranks. The checks of notebook 04 compare answers with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.course.labs.checks import Pool, from_cell
from labkit.course.labs.lab04.rows import forward_and_backward, sharded_row

if TYPE_CHECKING:
    from labkit.spmd.model.transformer import Transformer
    from labkit.spmd.trace.events import Trace


@dataclass(frozen=True)
class StepCase:
    """How a model is sharded and a step is taken.

    Attributes:
        num_blocks: Blocks below the root.
        reshard: Whether the blocks are freed after forward.
        prefetch: Whether backward gathers the next block early.
        num_micro: Micro-batches of the step.
        sync_each: Whether gradients are reduced after each micro-batch, not only after the last.
        keep: Whether parameters stay whole after each micro-batch's backward, except the last.
    """

    num_blocks: int
    reshard: bool
    prefetch: bool = True
    num_micro: int = 1
    sync_each: bool = True
    keep: bool = False


@dataclass(frozen=True)
class Step:
    """A rank's record of one step.

    Attributes:
        order: Its unshards and reshards, with short names.
        gathers: All-gathers; with one rank, unshards.
        reductions: Reduce-scatters; with one rank, the number that the rule gives, because none is called.
    """

    order: tuple[str, ...]
    gathers: int
    reductions: int


_recorded: dict[tuple[int, str, StepCase], Step] = {}


def recorded(pool: Pool, cases: Sequence[StepCase], *, timeout_s: float) -> list[Step]:
    """Return the record of these steps, equal on all ranks. Each step is recorded once, by the first check that needs it.

    The runtime does not change while a learner solves an exercise, and a second attempt should be answered at once.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    keys = {case: (pool.world_size, pool.device, case) for case in cases}
    missing = [case for case, key in keys.items() if key not in _recorded]
    if missing:
        found = pool.run(_record, missing, timeout_s=timeout_s).same()
        _recorded.update({keys[case]: step for case, step in zip(missing, found, strict=True)})
    return [_recorded[keys[case]] for case in cases]


# On the ranks -----------------------------------------------------------------------------------------------------------


def sharded_model(num_blocks: int) -> Transformer:
    """Make a small sharded transformer. Ranks: collective."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from labkit.spmd import Block, ModelConfig, build_model, shard_model

    device = from_cell("device")
    config = ModelConfig(dim=16, num_layers=num_blocks, num_heads=2, hidden_dim=24, max_seq_len=16)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return shard_model(build_model(config, device=device), mesh, blocks=Block)


def recorded_step(case: StepCase) -> Trace:
    """Return the events of one step, the first of a new model. Ranks: collective."""
    from labkit.spmd import record_events

    model = sharded_row([4] * case.num_blocks, [1] * case.num_blocks, reshard=case.reshard, prefetch=case.prefetch)
    with record_events(model) as recording:
        take_step(model, case)
    return recording.trace()


def take_step(model: Any, case: StepCase) -> None:
    """Take one step without an optimizer. Ranks: collective."""
    for number in range(case.num_micro):
        last = number == case.num_micro - 1
        model.set_requires_gradient_sync(case.sync_each or last)
        model.set_reshard_after_backward(last or not case.keep)
        forward_and_backward(model)


def _record(cases: list[StepCase]) -> list[Step]:
    return [_step(case) for case in cases]


def _step(case: StepCase) -> Step:
    import torch.distributed as dist

    from labkit.spmd.trace.events import UNSHARD

    trace = recorded_step(case)
    order = trace.order(names=False)
    if dist.get_world_size() > 1:
        counts = trace.counts()
        return Step(order, counts.get("all_gather", 0), counts.get("reduce_scatter", 0))
    reducing = case.num_micro if case.sync_each else 1
    return Step(order, trace.calls(UNSHARD)[1], reducing * len(trace.blocks))
