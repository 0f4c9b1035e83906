"""How an exercise is checked: run the learner's code, measure, compare with the target, say by how much it misses.

A check returns one line with the number it measured, or raises `ExerciseError` with three things: what was measured, what the
target is, and a hint that fits the mistake. Solutions are judged by what they do and never by how they are written.

Code of an exercise that runs on the ranks stands in a ``%%spmd`` cell, so it lives in the namespace of each rank. A check sends
a function there (`run_on_ranks`) that takes it from the namespace (`from_cell`), tries it, and returns what it saw as plain values.

No answer ends in a traceback of this package: a check calls the learner's function by `ask`, also on a rank, does what depends on
the form of an answer inside `trying`, and refuses one that does not come back by `refuse_hang`.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

from labkit.errors import ExerciseError, RankFailedError, RunTimeoutError
from labkit.ranks import RankResults, format_ranks
from labkit.tracebacks import is_library

T = TypeVar("T")
MeasuredT = TypeVar("MeasuredT")

_FILL_IN = "Fill in the exercise's cell and run it again."
_SENT = "Its first line has to be %%spmd, or the ranks keep what they have."
_SLOW = (
    "This may be a slow machine and no hang: the ranks still compute, or are all in the same call. Then a longer timeout_s helps."
)


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


def refuse_hang(name: str, error: RunTimeoutError, target: str, hint: str = "") -> NoReturn:
    """Refuse a solution that did not come back in time.

    Args:
        name: The learner's function.
        error: What the pool says of it.
        target: What it should do.
        hint: What may have gone wrong where ranks wait for one that does something else. Ranks that are all at work, or all in the
            same call, get another: they may only be slow.

    Raises:
        ExerciseError: Always.
    """
    together = not error.diagnosis or " all in " in error.diagnosis or " still computing at " in error.diagnosis
    slow = together and not error.finished and not error.failed_ranks
    refuse(f"{name} {'does not come back' if slow else 'hangs'}: {error}", target, _SLOW if slow else hint)


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
            raise ExerciseError(f"{name} is not solved yet. {_FILL_IN}") from None
        asked = f"{case}: {name}" if case else f"{name}({', '.join(map(repr, args))})"
        line = _own_line(error)
        place = f", in the line {line!r}" if line else ""
        raise ExerciseError(f"{asked} raised {_raised(error)}{place}. Call it for this case to see where it fails.") from error


@contextlib.contextmanager
def trying(answer: str, form: str, hint: str = "") -> Iterator[None]:
    """Take a learner's answer apart or put it to use: what raises in here is a matter of the answer, and refused.

    Args:
        answer: What is tried, in words, such as ``your result``.
        form: What it has to be.
        hint: What may have gone wrong, if the check can tell.

    Raises:
        ExerciseError: Anything raised inside; the cause is what it was.

    Ranks: controller or local.
    """
    try:
        yield
    except ExerciseError:
        raise
    except Exception as error:  # whatever an answer of another form runs into
        text = f"{answer} cannot be used: {_raised(error)}.\nTarget: {form}" + (f"\nHint: {hint}" if hint else "")
        raise ExerciseError(text) from error


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": .")


def _own_line(error: Exception) -> str:
    """The innermost line of the learner's own that the error came through."""
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not is_library(frame.f_code.co_filename)]
    return linecache.getline(own[-1][0].f_code.co_filename, own[-1][1]).strip() if own else ""


def hint_for(measured: MeasuredT, mistakes: Sequence[tuple[Callable[[MeasuredT], bool], str]], otherwise: str = "") -> str:
    """The hint of the first mistake that explains what was measured.

    Args:
        measured: What the solution did.
        mistakes: Pairs of a test for a mistake and its hint, the most telling first.
        otherwise: The hint when none applies. A test that cannot read what was measured does not apply.
    """
    for applies, hint in mistakes:
        with contextlib.suppress(Exception):
            if applies(measured):
                return hint
    return otherwise


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


def run_on_ranks(pool: Pool, function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> RankResults[T]:
    """`Pool.run` of a check's function: what it refuses on a rank is refused here.

    Raises:
        ExerciseError: The function raised one on a rank.
        RankFailedError: It raised something else.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    try:
        return pool.run(function, *args, timeout_s=timeout_s)
    except RankFailedError as error:
        raised = [failure for failure in error.failures if failure.kind == "exception"]
        if {failure.type_name.rpartition(".")[2] for failure in raised} != {ExerciseError.__name__}:
            raise
        same = len(raised) == len(error.failures) and len({failure.message for failure in raised}) == 1
        where = "" if same else f"rank {raised[0].rank}: "
        sent = f" {_SENT}" if raised[0].message.endswith(_FILL_IN) else ""
        raise ExerciseError(f"{where}{raised[0].message}{sent}") from error


def from_cell(name: str) -> Any:
    """What a ``%%spmd`` cell has defined under this name on this rank.

    Ranks: local. The namespace of a rank is the module ``__main__`` there.
    """
    return getattr(sys.modules["__main__"], name)


def _is_known(name: str) -> bool:
    return hasattr(sys.modules["__main__"], name)
