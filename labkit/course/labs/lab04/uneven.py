"""Exercise 5 of notebook 04: an evaluation in which some ranks have more batches than others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from labkit.base.ranks import RankResults
from labkit.course.labs.checks import Pool, ask, from_cell, hint_for, refuse, refuse_hang, require_on_ranks, run_on_ranks
from labkit.course.labs.lab04.steps import sharded_model
from labkit.errors import ExerciseError, RankFailedError, RunTimeoutError


@dataclass(frozen=True)
class Evaluated:
    """What one rank observed.

    Attributes:
        result: The result of the learner's function.
        losses: The true loss of each of this rank's batches, computed with an unsharded model.
        filler_loss: The loss of the filler.
    """

    result: Any
    losses: list[float]
    filler_loss: float


def check_eval_loss(pool: Pool, *, timeout_s: float) -> str:
    """Exercise 5: ``eval_loss(model, batches, filler)`` returns the mean loss over all batches of all ranks, on every rank.

    It is called twice. First, rank 0 has the most batches and the last rank has two. Then, if there are several ranks, the last one
    has none.

    Args:
        pool: The pool; ``eval_loss`` is defined on its ranks.
        timeout_s: Seconds after which the call counts as hung.

    Returns:
        A line with the measured loss.

    Raises:
        ExerciseError: The call hangs or raises, or a rank gets another value; the message shows the difference.

    Ranks: controller. Blocks for two times ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "eval_loss")
    last = pool.world_size - 1
    line = _judge(_seen(pool, [pool.world_size - rank + 1 for rank in range(pool.world_size)], timeout_s))
    if last == 0:
        return f"{line}."
    empty = [2] * last + [0]
    try:
        seen = _seen(pool, empty, timeout_s)
    except ExerciseError as error:
        if not isinstance(error.__cause__, RankFailedError):
            raise  # it hangs, which has its own hint
        refuse(
            f"{error}",
            "the mean over the batches of the others, on every rank.",
            "A rank without a batch has nothing of its own to repeat or to divide by. The filler is there for every rank.",
        )
    _judge(seen, f", when rank {last} has no batch at all")
    return f"{line}, also when rank {last} has no batch at all."


def _seen(pool: Pool, num_batches: list[int], timeout_s: float) -> RankResults[Evaluated]:
    try:
        return run_on_ranks(pool, _evaluate, num_batches, timeout_s=timeout_s)
    except RunTimeoutError as error:
        refuse_hang(
            "eval_loss",
            error,
            "it comes back on every rank.",
            "A forward of a sharded model is a collective call. A rank that has no batch left has to take part until all are done.",
        )


def _judge(seen: RankResults[Evaluated], when: str = "") -> str:
    losses = [loss for found in seen.values() for loss in found.losses]
    target = math.fsum(losses) / len(losses)
    for rank, found in seen.items():
        if not _is_close(found.result, target):
            wrong = found.result
            distance = f", {abs(wrong - target):.4g} off" if isinstance(wrong, int | float) else ""
            refuse(
                f"eval_loss returned {wrong!r} on rank {rank}{when}{distance}.",
                f"{target:.6g} on every rank.",
                _hint(wrong, target, seen),
            )
    counts = ", ".join(str(len(found.losses)) for found in seen.values())
    return f"Solved: every rank got {target:.6g}, the mean over {len(losses)} batches ({counts} by rank), and no rank waits"


def _hint(wrong: Any, target: float, seen: RankResults[Evaluated]) -> str:
    ranks = [found.losses for found in seen.values()]
    filler, most, fewest = seen[0].filler_loss, max(map(len, ranks)), min(map(len, ranks))
    padded = [loss for losses in ranks for loss in [*losses, *[filler] * (most - len(losses))]]
    repeated = [loss for losses in ranks for loss in [*losses, *losses[-1:] * (most - len(losses))]]
    cut = [loss for losses in ranks for loss in losses[:fewest]]
    means = [_mean(losses) for losses in ranks if losses]
    everything = math.fsum(loss for losses in ranks for loss in losses)
    return hint_for(
        wrong,
        [
            (
                lambda _: _is_close(seen[0].result, target),
                "Rank 0 has it. Every rank needs the sums of all: dist.all_reduce gives them to each, dist.reduce to one.",
            ),
            (lambda x: not isinstance(x, int | float), "Return a number, for example with .item()."),
            (
                lambda x: _is_close(x, _mean(padded)) or _is_close(x, _mean(repeated)),
                "A filler batch must not be counted.",
            ),
            (
                lambda x: bool(cut) and _is_close(x, _mean(cut)),
                f"You stop every rank after {fewest}. The other batches are part of the data.",
            ),
            (
                lambda x: _is_close(x, _mean(means)),
                "This is the mean of the ranks' means. A rank with more batches counts for more.",
            ),
            (
                lambda x: any(_is_close(x, mean) for mean in means),
                "This is the mean of one rank. Add up losses and counts over all.",
            ),
            (lambda x: _is_close(x, everything), "This is the sum. How many batches are there over all ranks?"),
        ],
        "Add up the losses of real batches and their number, over all ranks, and divide.",
    )


def _mean(losses: list[float]) -> float:
    return math.fsum(losses) / len(losses)


def _is_close(value: Any, target: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, target, rel_tol=1e-5)


def _evaluate(num_batches: list[int]) -> Evaluated:
    """Call the learner's function with the given number of batches for each rank."""
    import torch
    import torch.distributed as dist

    from labkit.spmd import BatchSampler, ModelConfig, build_model, next_token_loss

    rank, world_size, device = dist.get_rank(), dist.get_world_size(), from_cell("device")
    rows = BatchSampler(batch_size=2 * world_size, seq_len=8, seed=7, rank=rank, world_size=world_size, device=device)
    batches = [next(rows) for _ in range(num_batches[rank])]
    filler = torch.zeros_like(next(rows))
    model = sharded_model(2)
    config = ModelConfig(dim=16, num_layers=2, num_heads=2, hidden_dim=24, max_seq_len=16)
    whole = build_model(config, device=device)
    with torch.no_grad():
        losses = [next_token_loss(whole, batch).item() for batch in batches]
        filler_loss = next_token_loss(whole, filler).item()
    case = f"when rank {world_size - 1} has no batch at all" if not num_batches[-1] else f"with {num_batches} batches by rank"
    result = ask(from_cell("eval_loss"), model, batches, filler, case=case)
    return Evaluated(result.item() if isinstance(result, torch.Tensor) and result.numel() == 1 else result, losses, filler_loss)
