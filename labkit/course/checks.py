"""How an exercise is checked: run the learner's code, measure, compare with the target, say by how much it misses.

A check returns one line with the number it measured, or raises `ExerciseError` with three things: what was measured, what the
target is, and a hint that fits the mistake. Solutions are judged by what they do and never by how they are written.

Code of an exercise that runs on the ranks stands in a ``%%spmd`` cell, so it lives in the namespace of each rank. A check sends
a function there that takes it from the namespace (`from_cell`), tries it, and returns what it saw as plain values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

from labkit.errors import ExerciseError
from labkit.ranks import RankResults, format_ranks

T = TypeVar("T")
MeasuredT = TypeVar("MeasuredT")


class Pool(Protocol):
    """What a check needs of a pool; `labkit.WorkerPool` has it."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""

    def run(self, function: Callable[..., T], *args: Any, ranks: Any = None, timeout_s: float | None = None) -> RankResults[T]:
        """Call a function on the ranks."""


def refuse(measured: str, target: str, hint: str = "") -> NoReturn:
    """Refuse a solution.

    Args:
        measured: What it does, with the number and how far it is off.
        target: What it should do.
        hint: What may have gone wrong, if the check can tell.

    Raises:
        ExerciseError: Always.
    """
    # From None: what the check itself caught on the way is no matter of the learner's.
    raise ExerciseError(f"{measured}\nTarget: {target}" + (f"\nHint: {hint}" if hint else "")) from None


def ask(function: Callable[..., T], *args: Any, case: str = "") -> T:
    """The learner's answer.

    Args:
        function: The learner's.
        *args: What it is asked.
        case: The case in words, where the arguments say less.

    Raises:
        ExerciseError: It is still a hole, or it raised; then the message names the case, and the cause is what it raised.

    Ranks: controller or local.
    """
    name = getattr(function, "__name__", "the function")
    try:
        return function(*args)
    except Exception as error:  # whatever a learner's code raises is shown to them
        # With a text it is torch's own: DTensor says so of operators that it does not know.
        if isinstance(error, NotImplementedError) and not error.args:
            raise ExerciseError(f"{name} is not solved yet. Fill in the exercise's cell and run it again.") from None
        asked = f"{case}: {name}" if case else f"{name}({', '.join(map(repr, args))})"
        raised = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ExerciseError(f"{asked} raised {raised}. Call it for this case to see where it fails.") from error


def hint_for(measured: MeasuredT, mistakes: Sequence[tuple[Callable[[MeasuredT], bool], str]], otherwise: str = "") -> str:
    """The hint of the first mistake that explains what was measured.

    Args:
        measured: What the solution did.
        mistakes: Pairs of a test for a mistake and its hint, the most telling first.
        otherwise: The hint when none applies.
    """
    return next((hint for applies, hint in mistakes if applies(measured)), otherwise)


def require_on_ranks(pool: Pool, name: str) -> None:
    """Make sure that an exercise's cell has run.

    Raises:
        ExerciseError: A rank does not know the name; the message says which.

    Ranks: controller.
    """
    missing = [rank for rank, known in pool.run(_is_known, name).items() if not known]
    if missing:
        ranks = f"rank{'s' if len(missing) > 1 else ''} {format_ranks(missing)}"
        raise ExerciseError(f"there is no {name} on {ranks} yet. Run the exercise's cell first; it starts with %%spmd.")


def from_cell(name: str) -> Any:
    """What a ``%%spmd`` cell has defined under this name on this rank.

    Ranks: local. The namespace of a rank is the module ``__main__`` there.
    """
    return getattr(sys.modules["__main__"], name)


def _is_known(name: str) -> bool:
    return hasattr(sys.modules["__main__"], name)
