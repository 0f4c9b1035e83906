"""Exercise 3 of notebook 02: what moves and what is recomputed, by the order of the wrappers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

from labkit.course.labs.checks import Pool, ask, from_cell, refuse
from labkit.errors import ExerciseError

Order = tuple[str, ...]
Outcome = tuple[str, int]

KINDS = ("offload", "checkpoint", "shard")
# All orders, beginning with those without sharding: if these are right, a wrong answer is about sharding.
ORDERS: tuple[Order, ...] = tuple(
    sorted((order for size in range(len(KINDS) + 1) for order in permutations(KINDS, size)), key=lambda order: "shard" in order)
)


def check_outcome(pool: Pool, outcome: Callable[[Order], Any], *, timeout_s: float = 120.0) -> str:
    """Exercise 3: ``outcome(order)`` predicts what moves and how often a block runs, for wrappers from the outermost inwards.

    Each of the 16 orders is built around blocks on the ranks, and a step is counted.

    Args:
        pool: The pool.
        outcome: Takes names from ``offload``, ``checkpoint`` and ``shard``, outermost first; returns what moves (``"nothing"``,
            ``"inputs"`` or ``"everything"``) and how often a block's forward runs in a step.
        timeout_s: Seconds after which the counting counts as hung.

    Returns:
        A line with the number of orders.

    Raises:
        ExerciseError: An outcome differs; the message shows the order.

    Ranks: controller.
    """
    counted = pool.run(_count, ORDERS, timeout_s=timeout_s).same()
    extra_runs_only = True
    for order, (truth, moved_bytes) in zip(ORDERS, counted, strict=True):
        answer = _as_outcome(ask(outcome, order))
        extra_runs_only &= answer[1] == truth[1] - 1
        if answer != truth:
            built = "(".join([*order, "block"]) + ")" * len(order)
            refuse(
                f"{built}: you say that {_WHAT[answer[0]]} and a block runs {_times(answer[1])}.",
                f"{_WHAT[truth[0]]} ({moved_bytes:,} bytes in two blocks), and it runs {_times(truth[1])}, as the ranks counted.",
                _FIRST_RUN if extra_runs_only else _hint(order, answer, truth),
            )
    return f"Solved: {len(ORDERS)} orders, all as counted on the ranks."


_FIRST_RUN = "Count every run of forward, the first one too: without recomputation a block runs once."


def _hint(order: Order, answer: Outcome, truth: Outcome) -> str:
    if "shard" in order:
        return "Without the shard your answer is right. Sharding gathers and frees parameters. It touches no activation."
    if "checkpoint" in order and "offload" in order:
        if order.index("offload") > order.index("checkpoint"):
            return (
                "The hooks of the innermost one come first. Here the offload takes every tensor before the checkpoint sees it, so "
                "there is nothing left to recompute."
            )
        return (
            "The checkpoint is inside and comes first. It keeps only the inputs of the block, and these are what the offload gets; "
            "the rest is recomputed."
        )
    if not order:
        return "Nothing is wrapped around this block: no activation moves, and its forward runs once."
    if "offload" in order and answer[1] != truth[1]:
        return "An offload brings back what was saved. Nothing has to run again."
    if "checkpoint" in order and answer[1] != truth[1]:
        return "A checkpoint runs forward again in backward: once more, not twice more."
    if "checkpoint" in order and answer[0] == "inputs":
        return "The inputs are kept, but they stay on the device. Only an offload moves anything."
    return "Which wrapper gets a saved tensor first, and what does it do with it?"


_WHAT = {"nothing": "nothing moves", "inputs": "the inputs move", "everything": "everything moves"}


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _as_outcome(answer: Any) -> Outcome:
    is_pair = isinstance(answer, tuple | list) and len(answer) == 2
    if is_pair and isinstance(answer[0], str) and answer[0] in _WHAT and type(answer[1]) is int:
        return answer[0], answer[1]
    raise ExerciseError(f"outcome returned {answer!r}. It has to return a pair of one of {', '.join(_WHAT)} and a whole number.")


def _count(orders: tuple[Order, ...]) -> list[tuple[Outcome, int]]:
    return [_outcome_of(order) for order in orders]


def _outcome_of(order: Order) -> tuple[Outcome, int]:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from labkit.spmd.memory.spy import count_forwards
    from labkit.spmd.model.transformer import FeedForward, ModelConfig
    from labkit.spmd.offload.context import ActivationOffload
    from labkit.spmd.offload.transfer import CountingTransfer

    device = from_cell("device")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    blocks = [FeedForward(ModelConfig(dim=8, hidden_dim=12, num_heads=2)).to(device) for _ in range(2)]
    offloads: list[ActivationOffload] = []

    def wrap(module: torch.nn.Module, kind: str) -> torch.nn.Module:
        if kind == "checkpoint":
            return checkpoint_wrapper(module)
        if kind == "shard":
            fully_shard(module, mesh=mesh)
            return module
        # Count what would move, without copying anything on any device.
        offloads.append(ActivationOffload([module], min_bytes=1, transfer=CountingTransfer()))
        return module

    outer: list[torch.nn.Module] = []
    for block in blocks:
        wrapped: torch.nn.Module = block
        for kind in reversed(order):
            wrapped = wrap(wrapped, kind)
        outer.append(wrapped)
    x = torch.ones(3, 8, device=device, requires_grad=True)
    with count_forwards(blocks) as forwards:
        torch.nn.Sequential(*outer)(x).sum().backward()
    moved = sum(offload.counts.moved_bytes for offload in offloads)
    inputs = 2 * 3 * 8 * 4
    what = "nothing" if moved == 0 else "inputs" if moved == inputs else "everything"
    return (what, forwards[0]), moved
