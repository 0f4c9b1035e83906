"""Tools for checking exercises: run the learner's code, measure, compare with the target, and report the difference.

A check returns one line with the number it measured, or raises `ExerciseError` with the measurement, the target, and a hint that
fits the mistake. Solutions are judged by what they do, never by how they are written.

Exercise code that runs on the ranks is in a ``%%spmd`` cell, and thus in each rank's namespace. A check sends a function to the
ranks (`run_on_ranks`) that takes the learner's code from the namespace (`from_cell`), tries it, and returns what it observed as
plain values.

No answer may end in a traceback through this package. So a check calls the learner's function through `ask`, even on a rank, wraps
code that depends on the form of an answer in `trying`, and uses `refuse_hang` for an answer that does not come back.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

from labkit.base.plain_text import format_ranks
from labkit.base.ranks import RankResults
from labkit.base.tracebacks import is_library
from labkit.errors import ExerciseError, RankFailedError, RunTimeoutError, UnsolvedError

T = TypeVar("T")
MeasuredT = TypeVar("MeasuredT")

_FILL_IN = "Fill in the exercise's cell and run it again."
_SENT = "Its first line has to be %%spmd, or the ranks keep what they have."
_SLOW = (
    "This may be a slow machine, not a hang: the ranks still compute, or are all in the same call. Then a longer timeout_s helps."
)


class Pool(Protocol):
    """What a check needs from a pool; `labkit.WorkerPool` provides it."""

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
        measured: What the solution does, with the number and the difference.
        target: What it should do.
        hint: The likely mistake, if the check can tell.

    Raises:
        ExerciseError: Always.
    """
    # From None, because exceptions that the check itself caught do not concern the learner.
    raise ExerciseError(f"{measured}\nTarget: {target}" + (f"\nHint: {hint}" if hint else "")) from None


def refuse_hang(name: str, error: RunTimeoutError, target: str, hint: str = "") -> NoReturn:
    """Refuse a solution that did not come back in time.

    Args:
        name: The learner's function.
        error: The pool's error.
        target: What the function should do.
        hint: The likely mistake if some ranks wait for one that does something else. If all are computing, or all are in the same
            call, the learner is told instead that they may only be slow.

    Raises:
        ExerciseError: Always.
    """
    together = not error.diagnosis or " all in " in error.diagnosis or " still computing at " in error.diagnosis
    slow = together and not error.finished and not error.failed_ranks
    refuse(f"{name} {'does not come back' if slow else 'hangs'}: {error}", target, _SLOW if slow else hint)


def ask(function: Callable[..., T], *args: Any, case: str = "") -> T:
    """Call the learner's function and return its answer.

    Args:
        function: The learner's function.
        *args: Its arguments.
        case: A description of the case, if it is clearer than the arguments.

    Raises:
        UnsolvedError: The function is not solved yet.
        ExerciseError: The function raised; the message names the case, and the cause is the original error.

    Ranks: controller or local.
    """
    name = getattr(function, "__name__", "the function")
    try:
        return function(*args)
    except Exception as error:  # any error of a learner's code is shown to them
        # A NotImplementedError with a text is torch's: DTensor raises it for unsupported operators.
        if isinstance(error, NotImplementedError) and not error.args:
            raise UnsolvedError(f"{name} is not solved yet. {_FILL_IN}") from None
        asked = f"{case}: {name}" if case else f"{name}({', '.join(map(repr, args))})"
        line = _own_line(error)
        place = f", in the line {line!r}" if line else ""
        raise ExerciseError(f"{asked} raised {_raised(error)}{place}. Call it for this case to see where it fails.") from error


def require_answers(**answers: Any) -> None:
    """Make sure that an exercise's variables are set; its cell sets them to ``...`` before the learner's code.

    Raises:
        UnsolvedError: Some are still ``...``; the message names them.
    """
    if unset := [name for name, answer in answers.items() if answer is ...]:
        raise UnsolvedError(f"{' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set yet. {_FILL_IN}")


@contextlib.contextmanager
def trying(answer: str, form: str, hint: str = "") -> Iterator[None]:
    """Refuse a learner's answer if using it inside the block raises an error.

    Args:
        answer: A description of what is tried, such as ``your result``.
        form: The required form of the answer.
        hint: The likely mistake, if the check can tell.

    Raises:
        ExerciseError: The block raised an error, which is the cause.

    Ranks: controller or local.
    """
    try:
        yield
    except ExerciseError:
        raise
    except Exception as error:  # any error that an answer of the wrong form causes
        text = f"{answer} cannot be used: {_raised(error)}.\nTarget: {form}" + (f"\nHint: {hint}" if hint else "")
        raise ExerciseError(text) from error


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": .")


def _own_line(error: Exception) -> str:
    """Return the innermost line of the learner's own code that the error passed through."""
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not is_library(frame.f_code.co_filename)]
    return linecache.getline(own[-1][0].f_code.co_filename, own[-1][1]).strip() if own else ""


def hint_for(measured: MeasuredT, mistakes: Sequence[tuple[Callable[[MeasuredT], bool], str]], otherwise: str = "") -> str:
    """Return the hint of the first mistake that explains the measurement.

    Args:
        measured: The measurement of the solution.
        mistakes: Pairs of a test for a mistake and its hint, the most specific first.
        otherwise: The hint if no mistake applies. A mistake whose test cannot read the measurement does not apply.
    """
    for applies, hint in mistakes:
        with contextlib.suppress(Exception):
            if applies(measured):
                return hint
    return otherwise


def require_on_ranks(pool: Pool, name: str) -> None:
    """Make sure that an exercise's cell has run.

    Raises:
        UnsolvedError: A rank does not have the name; the message names the ranks.

    Ranks: controller.
    """
    missing = [rank for rank, known in pool.run(_is_known, name).items() if not known]
    if missing:
        ranks = f"rank{'s' if len(missing) > 1 else ''} {format_ranks(missing)}"
        raise UnsolvedError(f"there is no {name} on {ranks} yet. Run the exercise's cell first; it starts with %%spmd.")


def run_on_ranks(pool: Pool, function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> RankResults[T]:
    """Run a check's function by `Pool.run`; if it refuses the solution on a rank, refuse it here.

    Raises:
        ExerciseError: The function raised one on a rank.
        RankFailedError: It raised another error.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    try:
        return pool.run(function, *args, timeout_s=timeout_s)
    except RankFailedError as error:
        raised = [failure for failure in error.failures if failure.kind == "exception"]
        kinds = {failure.type_name.rpartition(".")[2] for failure in raised}
        if not kinds or not kinds <= {ExerciseError.__name__, UnsolvedError.__name__}:
            raise
        same = len(raised) == len(error.failures) and len({failure.message for failure in raised}) == 1
        where = "" if same else f"rank {raised[0].rank}: "
        sent = f" {_SENT}" if raised[0].message.endswith(_FILL_IN) else ""
        if sent:
            raise UnsolvedError(f"{where}{raised[0].message}{sent}") from None
        raise ExerciseError(f"{where}{raised[0].message}") from error


def from_cell(name: str) -> Any:
    """Return the object that a ``%%spmd`` cell defined under this name on this rank.

    Ranks: local. A rank's namespace is its module ``__main__``.
    """
    return getattr(sys.modules["__main__"], name)


def _is_known(name: str) -> bool:
    return hasattr(sys.modules["__main__"], name)
