"""Exercise 1 of notebook 03: FSDP2's spelling of FSDP1's sharding strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from labkit.course.labs.checks import Pool, ask, from_cell, hint_for, refuse, require_on_ranks, run_on_ranks, trying

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
NUM_BLOCKS = 3
_FORM = "the model that was given, sharded in place with fully_shard, and able to train."


@dataclass(frozen=True)
class Sharded:
    """What one rank observed of a model in one step.

    Attributes:
        held_bytes: Bytes of parameters between steps.
        order: The order in which blocks became whole (``U``) and were freed (``R``), as in `labkit.spmd.trace.events.Trace.order`.
        num_units: Number of FSDP units.
        gradient_gap: Largest difference of a gradient from the mean over all ranks, relative to the largest gradient.
        num_without_gradient: Number of parameters without a gradient after a backward.
    """

    held_bytes: int
    order: tuple[str, ...]
    num_units: int
    gradient_gap: float
    num_without_gradient: int


@dataclass(frozen=True)
class Pair:
    """The observations of the learner's model and of FSDP1's, and the order under the other strategy.

    Attributes:
        mine: Those of the learner's model.
        target: Those of FSDP1's, but with FSDP2's bytes, because FSDP1 cuts elements evenly while FSDP2 cuts rows.
        other_order: FSDP1's order under the other strategy.
        other_root_bytes: A rank's bytes if the blocks are right, but the root is whole when it should be cut, or the reverse.
    """

    mine: Sharded
    target: Sharded
    other_order: tuple[str, ...]
    other_root_bytes: int


def check_shard_like(pool: Pool, *, timeout_s: float = 90.0) -> str:
    """Exercise 1: ``shard_like(model, strategy)`` does with `fully_shard` what FSDP1 does under that strategy.

    Args:
        pool: The pool; ``shard_like`` is defined on its ranks.
        timeout_s: Seconds after which a rank counts as hung.

    Returns:
        A line with the bytes that a rank holds under each strategy.

    Raises:
        ExerciseError: Under a strategy, the bytes, the order of gathers or the gradients differ; or the function raised.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "shard_like")
    results = run_on_ranks(pool, _measure, timeout_s=timeout_s)
    shown = []
    for strategy in STRATEGIES:
        for rank, found in results.items():
            _judge(strategy, rank, found[strategy])
        shown.append(f"{strategy} {results[0][strategy].mine.held_bytes:,} bytes")
    note = "" if pool.world_size > 1 else " One rank cannot show more: it holds everything under each strategy."
    return f"Solved: rank 0 holds {', '.join(shown)} between steps; the order is FSDP1's, the gradients are the mean.{note}"


def _judge(strategy: str, rank: int, pair: Pair) -> None:
    mine, target = pair.mine, pair.target
    if mine.held_bytes != target.held_bytes:
        refuse(
            f"{strategy}: rank {rank} holds {mine.held_bytes:,} bytes of parameters between steps, "
            f"{mine.held_bytes / target.held_bytes:.3g} times the target.",
            f"{target.held_bytes:,} bytes.",
            hint_for(pair, _BYTES),
        )
    if mine.num_without_gradient:
        refuse(
            f"{strategy}: on rank {rank} {mine.num_without_gradient} parameters have no gradient after backward.",
            "the mean of the ranks' gradients, on every rank.",
            "torch holds a gradient back if it is told not to reduce it: set_requires_gradient_sync or set_requires_all_reduce.",
        )
    if mine.gradient_gap > 1e-3:
        refuse(
            f"{strategy}: on rank {rank} a gradient is off by {mine.gradient_gap:.2g} of the largest one.",
            "the mean of the ranks' gradients, on every rank.",
            hint_for(pair, _GRADIENTS),
        )
    if strategy != "NO_SHARD" and mine.order != target.order:
        refuse(
            f"{strategy}: your order is {' '.join(mine.order)}.",
            f"{' '.join(target.order)}.",
            hint_for(pair, _ORDER, "U makes a block whole, R frees it. Where do the two orders differ first?"),
        )


_Mistakes = list[tuple[Callable[[Pair], bool], str]]
_BYTES: _Mistakes = [
    (
        lambda pair: pair.mine.held_bytes == pair.other_root_bytes and pair.mine.num_units == NUM_BLOCKS + 1,
        "The blocks are right. Parameters outside the blocks belong to the root: it needs the same mesh.",
    ),
    (
        lambda pair: pair.mine.held_bytes < pair.target.held_bytes,
        "Under NO_SHARD each rank keeps everything. reshard_after_forward says when a block is freed; the mesh says whether "
        "it is cut at all.",
    ),
    (lambda pair: pair.mine.num_units == 0, "Nothing is sharded. Call fully_shard on each block and on the model."),
    (
        lambda pair: pair.mine.held_bytes > pair.target.held_bytes,
        "Some parameters are whole on every rank: was fully_shard called on every block and on the root, with the whole mesh?",
    ),
]
_GRADIENTS: _Mistakes = [
    (
        lambda pair: pair.mine.num_units == 0,
        "Nothing averages the gradients: a plain model follows the gradient of its own rank. FSDP averages along every axis of "
        "its mesh, including an axis of copies.",
    ),
    (lambda pair: pair.mine.num_units < NUM_BLOCKS + 1, "Gradients outside all units are not averaged. Shard the root as well."),
]
_ORDER: _Mistakes = [
    (
        lambda pair: pair.mine.num_units == 1,
        "There is one unit: the whole model is gathered at once. Call fully_shard on the blocks first, then on the model.",
    ),
    (
        lambda pair: pair.mine.order == pair.other_order,
        "That is the order of the other strategy. FULL_SHARD frees a block after its forward, SHARD_GRAD_OP keeps it until "
        "backward: reshard_after_forward.",
    ),
    (
        lambda pair: pair.mine.order.count("U root") > 1,
        "The root is freed after forward, and gathered again at once: backward begins there. Leave its argument to torch.",
    ),
]


def _measure() -> Any:
    """Return a `Pair` per strategy."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from labkit.spmd import BatchSampler, Block, ModelConfig, build_model

    rank, world_size, device = (from_cell(name) for name in ("rank", "world_size", "device"))
    config = ModelConfig(dim=32, num_layers=NUM_BLOCKS, num_heads=2, hidden_dim=96, max_seq_len=32)
    batch = next(BatchSampler(batch_size=2 * world_size, seq_len=16, rank=rank, world_size=world_size, device=device))

    def old(strategy: str) -> nn.Module:
        return FullyShardedDataParallel(
            build_model(config, device=device),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=device,
            use_orig_params=True,
        )

    truth = _mean_gradients(build_model(config, device=device), batch, world_size)
    targets = {strategy: _step(old(strategy), batch, None) for strategy in STRATEGIES}
    mine = {}
    for strategy in STRATEGIES:
        given = build_model(config, device=device)
        model = ask(from_cell("shard_like"), given, strategy, case=repr(strategy))
        if model is not given:  # fully_shard changes a module's class but keeps the module itself
            refuse(
                f"{strategy}: shard_like returned {_what(model)}.",
                _FORM,
                hint_for(model, _RETURNED, "fully_shard returns the module that it was given; return it from the function too."),
            )
        with trying(f"{strategy}: your model", _FORM):
            mine[strategy] = _step(model, batch, truth)
        del model, given
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    whole = build_model(config, device="meta")
    swap = {"FULL_SHARD": "SHARD_GRAD_OP", "SHARD_GRAD_OP": "FULL_SHARD", "NO_SHARD": "FULL_SHARD"}
    pairs = {}
    for name, target in targets.items():
        blocks, root = _bytes(whole, rank, 1 if name == "NO_SHARD" else world_size)
        other_root = _bytes(whole, rank, world_size if name == "NO_SHARD" else 1)[1]
        # On one rank FSDP1 cuts nothing under any strategy, so there is no order to compare with.
        order = mine[name].order if world_size == 1 else target.order
        exact = replace(target, held_bytes=blocks + root, order=order)
        pairs[name] = Pair(mine[name], exact, targets[swap[name]].order, blocks + other_root)
    return pairs


def _what(model: Any) -> str:
    from torch import nn

    return f"another module, a {type(model).__name__}" if isinstance(model, nn.Module) else f"{type(model).__name__}"


_RETURNED: list[tuple[Callable[[Any], bool], str]] = [
    (
        lambda model: type(model).__name__ == "FullyShardedDataParallel",
        "That is FSDP1 itself. What does fully_shard need to do the same?",
    ),
    (
        lambda model: type(model).__name__ == "DistributedDataParallel",
        "DDP averages gradients as NO_SHARD does, and wraps the model, so every name changes. fully_shard can do it: which mesh "
        "has pieces of one rank, and copies on all?",
    ),
]


def _bytes(model: Any, rank: int, num_parts: int) -> tuple[int, int]:
    """Return this rank's bytes of the blocks' and of all other parameters if `fully_shard` cuts rows into ``num_parts``."""
    held = [0, 0]
    for name, parameter in model.named_parameters():
        rows = -(-len(parameter) // num_parts)
        part = rank if num_parts > 1 else 0
        num_rows = max(0, min(len(parameter), rows * (part + 1)) - rows * part)
        held[not name.startswith("layers.")] += num_rows * parameter[0].numel() * parameter.element_size()
    return held[0], held[1]


def _mean_gradients(model: Any, batch: Any, world_size: int) -> dict[str, Any]:
    import torch.distributed as dist

    from labkit.spmd import next_token_loss

    next_token_loss(model, batch).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient.div_(world_size)
    return gradients


def _step(model: Any, batch: Any, truth: dict[str, Any] | None) -> Sharded:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from labkit.spmd import next_token_loss, record_events

    next_token_loss(model, batch).backward()  # the first step also sets FSDP up
    model.zero_grad()
    held = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()]
    held_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
    num_units = sum(isinstance(module, FSDPModule) for module in model.modules())
    with record_events(model) as recording:
        next_token_loss(model, batch).backward()
    gap, missing = 0.0, 0
    if truth is not None:
        largest = max(float(gradient.abs().max()) for gradient in truth.values())
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                missing += 1
                continue
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            gap = max(gap, float((whole - truth[name]).abs().max()) / largest)
    return Sharded(held_bytes, tuple(recording.trace().order(names=False)), num_units, gap, missing)
