"""Exercise 1 of notebook 00: the mean over all losses of all ranks."""

from __future__ import annotations

from labkit.base.plain_text import name_ranks
from labkit.base.ranks import RankResults
from labkit.course.labs.checks import Pool, hint_for, refuse, require_on_ranks
from labkit.course.labs.lab00.trial import Mistake, Trial, distance, is_close, on_ranks, try_function


def check_mean_loss(pool: Pool, *, timeout_s: float) -> str:
    """Exercise 1: ``mean_loss(losses)`` is the mean over all losses of all ranks, on every rank.

    It is called with the losses of the exercise and with others, because one number could be right by chance.

    Args:
        pool: The pool.
        timeout_s: Seconds after which a call counts as hung.

    Returns:
        A sentence with the measured value.

    Raises:
        ExerciseError: A rank has no ``mean_loss``, it hangs or raises, or its value is wrong; the message gives the difference.

    Ranks: controller. Blocks for two times ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "mean_loss")
    value, num_losses = 0.0, 0
    for case in ("losses of the exercise", "other losses"):
        trials = on_ranks(pool, "mean_loss", _try_mean_loss, case, timeout_s=timeout_s)
        target, count = _mean(trials)
        _require_mean(trials, target, case)
        if not num_losses:
            value, num_losses = target, count
    return (
        f"Solved: mean_loss is {value:.4g} on {name_ranks(trials)}, the mean of {num_losses} loss{'es' if num_losses > 1 else ''}."
    )


def _mean(trials: RankResults[Trial]) -> tuple[float, int]:
    losses = [loss for trial in trials.values() for loss in trial.given]
    return sum(losses) / len(losses), len(losses)


def _require_mean(trials: RankResults[Trial], target: float, case: str) -> None:
    rank_means = [sum(trial.given) / len(trial.given) for trial in trials.values()]
    total = sum(sum(trial.given) for trial in trials.values())
    asked = f"mean_loss, asked for {case}," if case.startswith("other") else "mean_loss"
    wrong = [rank for rank, trial in trials.items() if trial.answer.kind != "Tensor" or not is_close(trial.answer.numbers, target)]
    if not wrong:
        return
    rank = next((rank for rank in wrong if len(trials[rank].answer.numbers) != 1), wrong[0])
    answer, some = trials[rank].answer, len(wrong) < len(trials)
    all_own = all(is_close(trial.answer.numbers, mean) for trial, mean in zip(trials.values(), rank_means, strict=True))
    mistakes: list[Mistake] = [
        (lambda got: got.kind == "NoneType", "The function has to return the mean."),
        (
            lambda got: got.kind in ("float", "int") and is_close(got.numbers, target),
            "The value is right, the type is not: return the tensor, without .item().",
        ),
        (lambda got: got.kind != "Tensor", "A collective works on tensors."),
        (lambda got: len(got.numbers) != 1, "The mean is one number: sum before you divide."),
        (lambda got: all_own, "This is the mean of the rank's own losses. The other ranks have to contribute theirs."),
        (lambda got: some, "Every rank needs the value, so every rank has to compute it."),
        (
            lambda got: is_close(got.numbers, sum(rank_means) / len(rank_means)),
            "This is the mean of the ranks' means. A rank with more losses counts for more.",
        ),
        (lambda got: is_close(got.numbers, total), "This is the sum of all losses. How many are there?"),
        (
            lambda got: is_close(got.numbers, total / len(trials)),
            "This is the sum of all losses over the number of ranks. A rank has more than one loss: how many are there in all?",
        ),
    ]
    otherwise = (
        "The value is right only for the losses of the exercise. Compute it from `losses`." if case.startswith("other") else ""
    )
    off = distance(answer.numbers[0], target) if answer.kind == "Tensor" and len(answer.numbers) == 1 else ""
    refuse(
        f"{asked} is {answer.text} on rank {rank}{off}.",
        f"a tensor with one number, {target:.4g}, on {name_ranks(trials)}.",
        hint_for(answer, mistakes, otherwise),
    )


# On the ranks --------------------------------------------------------------------------------------------------------


def _try_mean_loss(case: str) -> Trial:
    import torch
    import torch.distributed as dist

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    losses = torch.full((rank + 1,), float(rank))
    if case.startswith("other"):
        losses = torch.arange(1.0, 2 * (num_ranks - rank) + 1) * (rank + 2)
    return try_function("mean_loss", losses)
