"""Checks of the exercises in notebook 00. Each measures on the ranks what the learner's code does there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from labkit.course.checks import Pool, from_cell, hint_for, refuse, require_on_ranks
from labkit.errors import RunTimeoutError
from labkit.ranks import name_ranks

_NUMBERS_PER_PIECE = 3


def check_mean_loss(pool: Pool) -> str:
    """Exercise 1: ``mean_loss`` is the mean over all losses of all ranks, on every rank.

    Returns:
        A sentence with the measured value.

    Raises:
        ExerciseError: A rank has no ``mean_loss`` or another value; the message says by how much it misses.

    Ranks: controller.
    """
    require_on_ranks(pool, "mean_loss")
    for rank, kind in pool.run(_kind_of_mean_loss).items():
        if kind:
            refuse(f"mean_loss is {kind} on rank {rank}.", "a tensor with one number.", "A collective works on tensors.")
    values = pool.run(_mean_loss)
    num_losses = sum(rank + 1 for rank in values)
    target = sum(rank * (rank + 1) for rank in values) / num_losses
    mean_of_means = sum(values.ranks) / len(values)  # each loss of rank r is r
    wrong = [rank for rank, value in values.items() if not _close(value, target)]
    if wrong:
        value = values[wrong[0]]
        hint = hint_for(
            value,
            [
                (lambda _: len(wrong) < len(values), "Every rank needs the value, so every rank has to compute it."),
                (
                    lambda value: _close(value, mean_of_means),
                    "This is the mean of the ranks' means. A rank with more losses counts for more.",
                ),
                (lambda value: _close(value, target * num_losses), "This is the sum of all losses. How many are there?"),
            ],
        )
        distance = f"{abs(value - target):.4g} too {'large' if value > target else 'small'}"
        refuse(f"mean_loss is {value:.4g} on rank {wrong[0]}, {distance}.", f"{target:.4g} on {name_ranks(values)}.", hint)
    return f"Solved: mean_loss is {target:.4g} on {name_ranks(values)}, the mean of {num_losses} losses."


def check_my_all_reduce(pool: Pool) -> str:
    """Exercise 2: ``my_all_reduce`` sums over the ranks with one reduce-scatter and one all-gather.

    Whole numbers go in, so the sums have to be exact.

    Returns:
        A sentence with what was counted.

    Raises:
        ExerciseError: A rank gets another result, its input has changed, or other collectives were called.

    Ranks: controller.
    """
    require_on_ranks(pool, "my_all_reduce")
    trials = pool.run(_try_my_all_reduce, _NUMBERS_PER_PIECE)
    target = [sum(column) for column in zip(*(trial.given for trial in trials.values()), strict=True)]
    for rank, trial in trials.items():
        if trial.result != target:
            refuse(
                f"my_all_reduce returned {_numbers(trial.result)} on rank {rank}.",
                f"{_numbers(target)}, the sum over the ranks.",
                _first_difference(trial.result, target),
            )
        _require_kept(rank, trial)
        if trial.calls != {"reduce-scatter": 1, "all-gather": 1}:
            counted = ", ".join(f"{count} {name}" for name, count in sorted(trial.calls.items())) or "none"
            refuse(
                f"The result is right, but rank {rank} called these collectives: {counted}.", "1 reduce-scatter and 1 all-gather."
            )
    return f"Solved: {name_ranks(trials)} got {_numbers(target)}, with one reduce-scatter and one all-gather each."


def check_log_mean(pool: Pool, *, timeout_s: float) -> str:
    """Exercise 3: ``log_mean`` comes back on every rank, with the mean on rank 0 only.

    Args:
        pool: The pool.
        timeout_s: Seconds after which the call counts as hung.

    Returns:
        A sentence with the measured value.

    Raises:
        ExerciseError: The call hung, a rank got something else, or a loss was overwritten.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "log_mean")
    hang = ""
    try:
        trials = pool.run(_try_log_mean, timeout_s=timeout_s)
    except RunTimeoutError as error:
        hang = str(error)
    if hang:
        refuse(f"log_mean hangs: {hang}", "it comes back on every rank.", "Every rank has to make the collective call.")
    target = sum(trial.given[0] for trial in trials.values()) / len(trials)
    for rank, trial in trials.items():
        wanted = target if rank == 0 else None
        if not (trial.result is None if wanted is None else isinstance(trial.result, float) and _close(trial.result, wanted)):
            refuse(f"log_mean returned {trial.result} on rank {rank}.", f"{wanted} there.")
        _require_kept(rank, trial)
    others = "the others got None" if len(trials) > 1 else "there are no others"
    return f"Solved: rank 0 got {target:g}, {others}, and nobody waits."


def _require_kept(rank: int, trial: Trial) -> None:
    if trial.kept != trial.given:
        refuse(
            f"The result is right, but on rank {rank} the input has become {_numbers(trial.kept)}.",
            f"it stays {_numbers(trial.given)}.",
        )


@dataclass(frozen=True)
class Trial:
    """What one rank saw of one call of the learner's function.

    Attributes:
        given: The numbers in the tensor before the call.
        kept: The numbers in the same tensor after it.
        result: The numbers of a returned tensor, or whatever else was returned.
        calls: How often each collective was called.
    """

    given: list[float]
    kept: list[float]
    result: Any
    calls: dict[str, int]


# On the ranks --------------------------------------------------------------------------------------------------------


def _kind_of_mean_loss() -> str:
    """What the learner's value is instead of a tensor with one number; empty when it is one."""
    import torch

    value = from_cell("mean_loss")
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}, {value!r:.40}"
    return "" if value.numel() == 1 else f"a tensor of {value.numel()} numbers"


def _mean_loss() -> float:
    return float(from_cell("mean_loss"))


def _try_my_all_reduce(numbers_per_piece: int) -> Trial:
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank())
    numbers = torch.randint(-9, 10, (dist.get_world_size() * numbers_per_piece,), generator=generator)
    return _try("my_all_reduce", numbers.float())


def _try_log_mean() -> Trial:
    import torch
    import torch.distributed as dist

    return _try("log_mean", torch.tensor([float(10 ** dist.get_rank())]))


def _try(name: str, numbers: Any) -> Trial:
    import torch

    function, given, tensor = from_cell(name), numbers.tolist(), numbers.to(from_cell("device"))
    with _counted() as calls:
        result = function(tensor)
    return Trial(given, tensor.tolist(), result.tolist() if isinstance(result, torch.Tensor) else result, dict(calls))


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count calls of torch.distributed's collectives while the block runs. Older and newer spellings count as one."""
    import torch.distributed as dist

    families = {
        "reduce_scatter": "reduce-scatter",
        "all_gather": "all-gather",
        "all_reduce": "all-reduce",
        "broadcast": "broadcast",
    }
    names = {
        name: label
        for name in dir(dist)
        for start, label in families.items()
        if name.startswith(start) and callable(getattr(dist, name))
    }
    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[names[name]] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


# Words and numbers ---------------------------------------------------------------------------------------------------------------


def _close(value: float, target: float) -> bool:
    return math.isclose(value, target, rel_tol=1e-5, abs_tol=1e-6)


def _numbers(value: Any) -> str:
    return "[" + ", ".join(f"{number:g}" for number in value) + "]" if isinstance(value, list) else repr(value)


def _first_difference(result: Any, target: list[float]) -> str:
    if not isinstance(result, list) or len(result) != len(target):
        return f"It has to be a tensor of {len(target)} numbers."
    position = next(i for i, (got, wanted) in enumerate(zip(result, target, strict=True)) if got != wanted)
    return f"The first difference is at position {position}: {result[position]:g} where {target[position]:g} is due."
