"""Exercise 2 of notebook 00: an all-reduce of two halves."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.base.plain_text import name_ranks
from labkit.course.labs.checks import Pool, hint_for, refuse, require_on_ranks
from labkit.course.labs.lab00.trial import Mistake, Trial, listed, on_ranks, require_kept, try_function

_NUMBERS_PER_PIECE = 3


def check_my_all_reduce(pool: Pool, *, timeout_s: float) -> str:
    """Exercise 2: ``my_all_reduce`` sums over the ranks with one reduce-scatter and one all-gather.

    The inputs are whole numbers, so the sums have to be exact.

    Args:
        pool: The pool.
        timeout_s: Seconds after which the call counts as hung.

    Returns:
        A sentence with what was counted.

    Raises:
        ExerciseError: The call hung or raised, a rank gets another result, its input has changed, or other collectives were called.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "my_all_reduce")
    trials = on_ranks(pool, "my_all_reduce", _try_my_all_reduce, _NUMBERS_PER_PIECE, timeout_s=timeout_s)
    target = [sum(column) for column in zip(*(trial.given for trial in trials.values()), strict=True)]
    num_ranks = len(trials)
    for rank, trial in trials.items():
        answer = trial.answer
        if answer.shape != (len(target),) or answer.numbers != target:
            mistakes: list[Mistake] = [
                (lambda got: got.kind == "NoneType", "The function has to return the sum."),
                (
                    lambda got: got.kind in ("list", "tuple"),
                    "These are the pieces. torch.cat joins them into one tensor.",
                ),
                (
                    lambda got: got.kind == "Tensor" and got.numbers == target,
                    "The numbers are right, the shape is not: torch.stack makes rows of pieces, torch.cat joins them end to end.",
                ),
                (
                    lambda got: got.kind == "Tensor" and num_ranks > 1 and len(got.numbers) * num_ranks == len(target),
                    f"This is one piece. It has to be a tensor of {len(target)} numbers: the all-gather joins the pieces.",
                ),
                (lambda got: got.shape != (len(target),), f"It has to be a tensor of {len(target)} numbers."),
                (lambda got: got.numbers == [number / num_ranks for number in target], "This is the mean. Return the sum."),
            ]
            refuse(
                f"my_all_reduce returned {answer.text} on rank {rank}.",
                f"a tensor {listed(target)}, the sum over the ranks.",
                hint_for(answer, mistakes) or _first_difference(answer.numbers, target),
            )
        require_kept(rank, trial)
        if trial.calls != {"reduce-scatter": 1, "all-gather": 1}:
            counted = ", ".join(f"{count} {name}" for name, count in sorted(trial.calls.items())) or "none"
            refuse(
                f"The result is right, but rank {rank} called these collectives: {counted}.", "1 reduce-scatter and 1 all-gather."
            )
    return f"Solved: {name_ranks(trials)} got {listed(target)}, with one reduce-scatter and one all-gather each."


def _first_difference(numbers: Sequence[float], target: Sequence[float]) -> str:
    position = next(i for i, (got, wanted) in enumerate(zip(numbers, target, strict=True)) if got != wanted)
    return f"The first difference is at position {position}: {numbers[position]:g} instead of {target[position]:g}."


# On the ranks --------------------------------------------------------------------------------------------------------


def _try_my_all_reduce(numbers_per_piece: int) -> Trial:
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank())
    numbers = torch.randint(-9, 10, (dist.get_world_size() * numbers_per_piece,), generator=generator)
    return try_function("my_all_reduce", numbers.float())
