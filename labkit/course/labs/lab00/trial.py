"""A call of a learner's function on every rank: its input, its answer, and the collectives it called."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from labkit.base.ranks import RankResults
from labkit.course.labs.checks import Pool, ask, from_cell, refuse, refuse_hang, run_on_ranks, trying
from labkit.errors import RunTimeoutError


@dataclass(frozen=True)
class Answer:
    """The answer of the learner's function on one rank.

    Attributes:
        kind: The name of its type, ``Tensor`` for a tensor.
        shape: The shape of a tensor; else empty.
        numbers: The numbers in a tensor, or a number; else empty.
        text: The answer as text for people, with its type.
    """

    kind: str
    shape: tuple[int, ...]
    numbers: list[float]
    text: str


@dataclass(frozen=True)
class Trial:
    """One rank's record of one call of the learner's function.

    Attributes:
        given: The numbers in the tensor before the call.
        kept: The numbers in the same tensor after it.
        answer: The return value.
        calls: The number of calls of each collective.
    """

    given: list[float]
    kept: list[float]
    answer: Answer
    calls: dict[str, int]


Mistake = tuple[Callable[[Answer], bool], str]


def on_ranks(pool: Pool, name: str, function: Callable[..., Trial], *args: object, timeout_s: float) -> RankResults[Trial]:
    """Try the learner's function on the ranks. A hang is refused like any other answer."""
    try:
        return run_on_ranks(pool, function, *args, timeout_s=timeout_s)
    except RunTimeoutError as error:
        hint = "Every rank has to make the collective call." if pool.world_size > 1 else ""
        refuse_hang(name, error, "it comes back on every rank.", hint)


def require_kept(rank: int, trial: Trial) -> None:
    """Refuse a correct result if the input was changed. Ranks: controller."""
    if trial.kept != trial.given:
        refuse(
            f"The result is right, but on rank {rank} the input has become {listed(trial.kept)}.",
            f"it stays {listed(trial.given)}.",
            "A collective works in place. Give it a copy.",
        )


# Words and numbers ---------------------------------------------------------------------------------------------------------------


def is_close(numbers: Sequence[float], target: float) -> bool:
    """Return whether there is exactly one number, which equals the target up to float32 rounding."""
    return len(numbers) == 1 and math.isclose(numbers[0], target, rel_tol=1e-5, abs_tol=1e-6)


def distance(value: float, target: float) -> str:
    """Describe the difference from the target, as the end of a sentence; empty for NaN and infinity."""
    if not math.isfinite(value):
        return ""
    return f", {abs(value - target):.4g} too {'large' if value > target else 'small'}"


def listed(numbers: Sequence[float]) -> str:
    """Format the numbers of a tensor."""
    return "[" + ", ".join(f"{number:g}" for number in numbers) + "]"


# On the ranks --------------------------------------------------------------------------------------------------------


def try_function(name: str, numbers: Any) -> Trial:
    """Call the learner's function of this name with a tensor, on the rank's device.

    Raises:
        ExerciseError: It raised, or its result cannot be read.

    Ranks: collective if the function is.
    """
    function, given, tensor = from_cell(name), numbers.tolist(), numbers.to(from_cell("device"))
    with _counted() as calls:
        result = ask(function, tensor)
    with trying(f"what {name} returned", "a tensor or a number."):
        return Trial(given, tensor.tolist(), _answer(result), dict(calls))


def _answer(result: Any) -> Answer:
    import torch

    kind = type(result).__name__
    if isinstance(result, torch.Tensor):
        numbers = result.detach().flatten().tolist()
        shape = tuple(result.shape)
        text = f"a tensor {listed(numbers)}" + (f" of shape {shape}" if len(shape) > 1 else "")
        return Answer("Tensor", shape, numbers, text)
    if result is None:
        return Answer(kind, (), [], "None")
    numbers = [float(result)] if kind in ("float", "int") else []
    return Answer(kind, (), numbers, f"a {kind}, {result!r:.80}")


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count calls of torch.distributed's collectives during the block, with older and newer spellings counted together."""
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
