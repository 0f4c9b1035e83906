"""All exceptions that labkit raises.

Each class takes its fields first and builds its message from them: code can use the fields and people can read the message. The
message says what happened, on which ranks, and what to do next. All of the exceptions survive pickling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from labkit.base.plain_text import indent, name_ranks, printable

P = ParamSpec("P")
T = TypeVar("T")

# Jupyter and terminals show these codes; nbconvert turns them into colours of the page.
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[1;31m", "\x1b[0m"

FailureKind = Literal["exception", "interrupted", "died", "exited"]


class LabkitError(Exception):
    """The base class of labkit's exceptions."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce(self)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the reader's own lines and the message, without labkit's frames."""
        from IPython import get_ipython  # only IPython calls this method

        from labkit.base.tracebacks import format_error

        compiled = get_ipython().compile
        return [format_error(self, compiled._filename_map.get, own_lines_only=True)]


def raises_here(function: Callable[P, T]) -> Callable[P, T]:
    """Make labkit's errors appear to come from this function, because the frames below it would not help a reader."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True  # pytest leaves out this frame too
        try:
            return function(*args, **kwargs)
        except (LabkitError, RunReport) as error:
            raise error.with_traceback(None)  # noqa: B904 (it is the same error)

    return call


def _reduce(error: BaseException) -> tuple[Any, ...]:
    # Exceptions pickle as cls(*args), and args holds the built message here, so rebuild from the fields instead.
    return _rebuild, (type(error), str(error), error.__dict__)


def _rebuild(cls: type[BaseException], message: str, fields: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, message)
    error.__dict__.update(fields)
    return error


@dataclass(frozen=True)
class RankFailure:
    """The failure of a run on one rank.

    Attributes:
        rank: The global rank.
        kind: ``exception`` (the cell raised), ``interrupted`` (labkit or a signal stopped it), ``died`` (the process
            is gone) or ``exited`` (the cell raised SystemExit).
        type_name: The exception's class name, for example ``ValueError``; the signal or exit code for ``died``.
        message: The exception's text; for ``died``, what is known about the death.
        traceback: Traceback lines as text, innermost last, without labkit's own frames; empty for ``died``.
        exitcode: For ``died``: the exit status as in :attr:`subprocess.Popen.returncode` (negative for a signal).
        last_output: For ``died``: the last lines that the rank wrote, at most 20.
        where: The innermost of the reader's own lines, for example ``Cell In[7], line 5``; empty if there is none.
        in_handler: For ``interrupted``: the error came from the reader's own ``except`` or ``finally`` for the interrupt.
    """

    rank: int
    kind: FailureKind
    type_name: str
    message: str
    traceback: str = ""
    exitcode: int | None = None
    last_output: str = ""
    where: str = ""
    in_handler: bool = False

    def headline(self) -> str:
        """Return one line: the exception's type and the first line of its text."""
        first = self.message.strip().split("\n", 1)[0]
        if self.kind == "died":
            return f"died ({self.type_name}): {first}"
        return f"{self.type_name}: {first}" if first else self.type_name


class RankSpecError(LabkitError, ValueError):
    """A rank set names no rank, names a rank outside the world, or cannot be read."""


class PoolStateError(LabkitError):
    """The pool cannot do this now: it is closed, a run is in progress, a rank is dead, or another pool is open."""


class InvalidPoolError(LabkitError, ValueError):
    """This machine cannot run a pool with these arguments (world size, device, number of GPUs)."""


class InvalidRunError(LabkitError, ValueError):
    """The arguments of a run are invalid: the function is not callable, or the time limit is not a positive number."""


class WorkerStartError(LabkitError):
    """A pool did not start. None of its processes is left running.

    Attributes:
        reason: The reason, in words.
        rank: The first rank that failed, or None when the start as a whole ran out of time.
        exitcode: That rank's exit status, or None when it did not exit.
        stderr_tail: The last lines that the rank wrote, at most 20.
    """

    def __init__(self, reason: str, *, rank: int | None = None, exitcode: int | None = None, stderr_tail: str = "") -> None:
        self.reason, self.rank, self.exitcode, self.stderr_tail = reason, rank, exitcode, stderr_tail
        who = f"rank {rank} did not start" if rank is not None else "the pool did not start"
        text = f"{who}: {reason}"
        if stderr_tail:
            text += "\nIts last output:\n" + indent(stderr_tail)
        super().__init__(text + "\nNo worker is left running. `labkit doctor` says what this machine can run.")


class RunReport(BaseException):
    """A report on a run that did not finish on every rank.

    Attributes:
        failures: One RankFailure per rank that did not finish, in rank order; the cause comes before its victims.
        finished: The ranks that finished the run normally.
        notes: The actions that labkit took, one sentence each (interrupted ranks, rebuilt groups).
        diagnosis: The cause of the hang when the run was stopped, in one sentence; empty if there was none.
    """

    def __init__(
        self,
        failures: Sequence[RankFailure],
        finished: Sequence[int] = (),
        notes: Sequence[str] = (),
        *,
        diagnosis: str = "",
    ) -> None:
        self.failures = tuple(failures)
        self.finished = tuple(finished)
        self.notes = tuple(notes)
        self.diagnosis = diagnosis
        super().__init__(self._message())
        # Only IPython calls _render_traceback_. Python, pytest and loggers show notes.
        for ranks, told in self._told():
            self.add_note(f"{name_ranks(ranks)}:\n{told}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce(self)

    def _ranks(self, *kinds: FailureKind) -> list[int]:
        return [failure.rank for failure in self.failures if failure.kind in kinds]

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        """Ranks whose own code raised or whose process died."""
        return tuple(self._ranks("exception", "exited", "died"))

    @property
    def interrupted_ranks(self) -> tuple[int, ...]:
        """Ranks that labkit stopped because the run could not go on."""
        return tuple(self._ranks("interrupted"))

    def _message(self) -> str:
        lines = [self._headline()]
        if self.diagnosis:
            lines.append(self.diagnosis)
        elif self.interrupted_ranks:
            rest = f"; {name_ranks(self.finished)} finished" if self.finished else ""
            lines.append(f"{name_ranks(self.interrupted_ranks)} did not finish and had to be interrupted{rest}.")
        return "\n".join([*lines, *self.notes])

    def _headline(self) -> str:
        parts = [f"{name_ranks(ranks)}: {text}" for text, ranks in self._by_headline().items()]
        return "; ".join(parts) or f"{name_ranks(self.interrupted_ranks)}: interrupted"

    def _by_headline(self) -> Mapping[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for failure in self.failures:
            if failure.kind != "interrupted":
                groups.setdefault(failure.headline(), []).append(failure.rank)
        return groups

    def grouped(self) -> list[tuple[list[int], RankFailure]]:
        """Group failures that have the same traceback: (ranks, one of the failures), causes before interrupted ranks."""
        groups: dict[tuple[str, ...], list[RankFailure]] = {}
        for failure in self.failures:
            key = (failure.kind, failure.type_name, failure.message, failure.traceback, failure.last_output)
            groups.setdefault(key, []).append(failure)
        ordered = sorted(groups.values(), key=lambda group: (group[0].kind == "interrupted", group[0].rank))
        return [([failure.rank for failure in group], group[0]) for group in ordered]

    def _told(self) -> Iterator[tuple[list[int], str]]:
        """Yield each distinct failure once: the ranks with its traceback, or with how they died and what they wrote last."""
        for ranks, failure in self.grouped():
            if failure.kind != "interrupted":
                last = f"\nIts last output in this run:\n{indent(failure.last_output)}" if failure.last_output else ""
                yield ranks, (failure.traceback or failure.headline()) + last

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of the kernel's own frames: each different remote traceback once."""
        lines = [line for ranks, told in self._told() for line in (f"{_BOLD}{name_ranks(ranks)}{_PLAIN}", told, "")]
        lines.append(f"{_RED}{type(self).__name__}{_PLAIN}: {self}")
        return lines


class RunError(RunReport, LabkitError):
    """A run failed on at least one rank."""


class RankFailedError(RunError):
    """The code of a run raised on one or more ranks. The pool and all variables on the ranks are kept."""


class WorkerDiedError(RunError):
    """The process of one or more ranks ended during a run. The variables of those ranks are lost."""


@dataclass(frozen=True)
class LeftOpen:
    """A collective that a run left open: some ranks of its group have begun it, others have not.

    Attributes:
        name: For example ``all_reduce``.
        number: Its number in its group, from 1.
        group: The group, described in words.
        begun: The ranks that have begun it.
        missing: The ranks of the group that have not begun it.
    """

    name: str
    number: int
    group: str
    begun: tuple[int, ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        verb = "has" if len(self.begun) == 1 else "have"
        missing = f"{name_ranks(self.missing)} {'has' if len(self.missing) == 1 else 'have'} not"
        return f"{name_ranks(self.begun)} {verb} begun {self.name} #{self.number} of {self.group}, {missing}."


class OpenCollectiveError(RunError):
    """A run ended on every rank, but some ranks have begun a collective that others of its group have not.

    The group's next collective would have been matched with it and would have given wrong values, so the group was aborted and
    rebuilt. The contents of the tensor that the collective was to fill are undefined.

    Attributes:
        collectives: The open ones.
    """

    def __init__(
        self, collectives: Sequence[LeftOpen] = (), finished: Sequence[int] = (), notes: Sequence[str] = (), *, diagnosis: str = ""
    ) -> None:
        self.collectives = tuple(collectives)
        super().__init__((), finished, notes, diagnosis=diagnosis)

    def _headline(self) -> str:
        told = " ".join(map(str, self.collectives))
        return (
            f"the run ended with a collective that not all ranks have begun. {told} It was given up, so that the next collective "
            "is not matched with it. The contents of its tensor are undefined. Every rank of a group has to make the same calls; "
            "wait() for those with async_op=True before the cell ends."
        )


class RunTimeoutError(RunError):
    """A run did not finish within its time limit and was interrupted.

    Attributes:
        timeout_s: The limit in seconds.
    """

    def __init__(
        self,
        failures: Sequence[RankFailure],
        finished: Sequence[int] = (),
        notes: Sequence[str] = (),
        *,
        diagnosis: str = "",
        timeout_s: float = 0.0,
    ) -> None:
        self.timeout_s = timeout_s
        super().__init__(failures, finished, notes, diagnosis=diagnosis)

    def _headline(self) -> str:
        raised = super()._headline() if self._by_headline() else ""
        return f"the run did not finish in {self.timeout_s:g} s" + (f"; {raised}" if raised else "")


class RunInterrupted(RunReport, KeyboardInterrupt):
    """The run was interrupted from the notebook.

    A KeyboardInterrupt and not a LabkitError: it stops everything that Ctrl-C stops, and ``except Exception`` does not catch it.
    """

    def _headline(self) -> str:
        raised = super()._headline() if self._by_headline() else ""
        return "the run was interrupted" + (f"; {raised}" if raised else "")


class WireError(LabkitError):
    """A message could not be sent or understood: an argument or result cannot be pickled, or the other side is broken."""


class StrangerError(LabkitError):
    """Another user of this machine took a rank's place in a process group while it was being made. Nothing was sent to that user.

    Attributes:
        uid: The user's number.
        user: The user's name; empty where the system knows none.
        port: The port to which that user connected, or at which that user answered.
    """

    def __init__(self, uid: int, user: str, port: int, *, answered: bool = False) -> None:
        self.uid, self.user, self.port = uid, user, port
        who = f"the user {user} (uid {uid})" if user else f"a user without a name (uid {uid})"
        super().__init__(
            f"{who} {'answered at' if answered else 'connected to'} port {port} of this machine in place of a rank, while the "
            "ranks were making a process group. The connection was closed, nothing was sent over it, and the group was not made. "
            "Try again. If it happens again, somebody is trying to read what ranks send each other: tell the machine's "
            "administrator, or start the pool where others cannot reach its loopback device, for example in a container."
        )


class ExerciseError(LabkitError, AssertionError):
    """The check of an exercise measured something other than its target."""


class UnsolvedError(ExerciseError):
    """An exercise has no answer yet."""

    def _render_traceback_(self) -> list[str]:
        """Return the one line that IPython shows."""
        return [str(self)]


class CheckpointError(LabkitError):
    """A checkpoint cannot be used as asked. The base class of labkit.checkpoint's errors.

    Its text may contain names from a file, so characters that could drive a terminal or fake a line are escaped.
    """

    def __str__(self) -> str:
        return printable(super().__str__())
