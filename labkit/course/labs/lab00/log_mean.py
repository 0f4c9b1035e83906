"""Exercise 3 of notebook 00: the mean loss for rank 0 only."""

from __future__ import annotations

from labkit.course.labs.checks import Pool, hint_for, refuse, require_on_ranks
from labkit.course.labs.lab00.trial import Mistake, Trial, is_close, on_ranks, require_kept, try_function


def check_log_mean(pool: Pool, *, timeout_s: float) -> str:
    """Exercise 3: ``log_mean`` comes back on every rank, with the mean on rank 0 only.

    Args:
        pool: The pool.
        timeout_s: Seconds after which the call counts as hung.

    Returns:
        A sentence with the measured value.

    Raises:
        ExerciseError: The call hung or raised, a rank got something else, or a loss was overwritten.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "log_mean")
    trials = on_ranks(pool, "log_mean", _try_log_mean, timeout_s=timeout_s)
    losses = [trial.given[0] for trial in trials.values()]
    target = sum(losses) / len(losses)
    for rank, trial in trials.items():
        answer = trial.answer
        if rank == 0 and not (answer.kind in ("float", "int") and is_close(answer.numbers, target)):
            mistakes: list[Mistake] = [
                (lambda got: got.kind == "NoneType", "Rank 0 writes the log, so rank 0 needs the mean."),
                (
                    lambda got: got.kind == "Tensor" and is_close(got.numbers, target),
                    "The value is right, but it is still a tensor. .item() turns it into a number.",
                ),
                (lambda got: not got.numbers, "Return a number."),
                (lambda got: is_close(got.numbers, sum(losses)), "This is the sum over the ranks. How many losses are in it?"),
                (
                    lambda got: is_close(got.numbers, losses[0]),
                    "This is rank 0's own loss. The other ranks have to contribute theirs.",
                ),
                (
                    lambda got: is_close(got.numbers, losses[0] / len(losses)),
                    "This is rank 0's own loss, divided. The other ranks have to contribute theirs.",
                ),
            ]
            refuse(f"log_mean returned {answer.text} on rank 0.", f"the number {target:g} there.", hint_for(answer, mistakes))
        if rank > 0 and answer.kind != "NoneType":
            hint = "Only rank 0 returns the mean. The code after the collective may go under `if rank == 0`."
            refuse(f"log_mean returned {answer.text} on rank {rank}.", "None there.", hint)
        require_kept(rank, trial)
    others = "the others got None" if len(trials) > 1 else "there are no others"
    return f"Solved: rank 0 got {target:g}, {others}, and no rank is left waiting."


# On the ranks --------------------------------------------------------------------------------------------------------


def _try_log_mean() -> Trial:
    import torch
    import torch.distributed as dist

    return try_function("log_mean", torch.tensor([float(10 ** dist.get_rank())]))
