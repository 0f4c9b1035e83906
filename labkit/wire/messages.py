"""The messages between controller and workers.

The events of each rank follow one grammar: ``Ready ( Output* (Result | Failed) )* Bye``. There is exactly one terminal message
(Result or Failed) for each run and rank, and it comes after all of that run's output. When a worker dies, the controller writes the
missing Failed itself, so there is one code path for every way a run can end.

Messages hold built-in types only. User data (functions, arguments, values) travels inside them as a packed payload. So a payload
that cannot be unpacked is an error of that run and not of the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from labkit.errors import RankFailure
from labkit.wire.payload import Payload
from labkit.wire.record import WireRecord

StreamName = Literal["stdout", "stderr"]


# ---- controller to worker, main thread -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Execute(WireRecord):
    """Run something on this rank.

    Attributes:
        run_id: Counts the pool's runs from 1.
        ranks: All the ranks of the run.
        kind: ``cell`` runs ``source``; ``call`` runs the packed ``(function, args, kwargs)``; ``push`` stores the packed dict of
            variables; ``pull`` returns the value of the expression in ``source``; ``rebuild`` makes new process groups and repairs
            the objects that used the old ones; ``ask`` reports what keeps new ranks from joining.
        source: Python source for ``cell`` and ``pull``.
        payload: The packed data for ``call`` and ``push``.
        cell_number: The kernel's number of the cell, so that tracebacks say ``Cell In[7]``; None outside a notebook.
        want_value: For ``cell``: return the last expression's value, not only its display.
        group: For ``rebuild``: where the ranks meet.
    """

    run_id: int
    ranks: tuple[int, ...]
    kind: Literal["cell", "call", "push", "pull", "rebuild", "ask"]
    source: str = ""
    payload: Payload | None = None
    cell_number: int | None = None
    want_value: bool = False
    group: GroupSpec | None = None


@dataclass(frozen=True, slots=True)
class Shutdown(WireRecord):
    """End the worker once it has processed the messages before this one."""


@dataclass(frozen=True, slots=True)
class GroupSpec(WireRecord):
    """The information with which ranks find each other to form the default process group.

    Attributes:
        store: A file path for a local pool (torch's FileStore, no port), or ``tcp://host:port/name`` for a TCPStore and a prefix.
        generation: Counts the groups of this pool from 0; a new one follows each abort.
        world_size: Number of ranks.
    """

    store: str
    generation: int
    world_size: int


# ---- controller to worker, control thread ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interrupt(WireRecord):
    """Raise KeyboardInterrupt in the main thread if it still works on ``run_id``."""

    run_id: int


@dataclass(frozen=True, slots=True)
class Abort(WireRecord):
    """Free the main thread from native collectives: abort this rank's process groups."""

    run_id: int


@dataclass(frozen=True, slots=True)
class Inspect(WireRecord):
    """Report what this rank is doing."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Release(WireRecord):
    """Free the buffers of ``run_id``'s result: the controller has read them."""

    run_id: int


# ---- worker to controller --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready(WireRecord):
    """This rank has a process group and has completed a collective."""

    rank: int
    pid: int
    hostname: str
    device: str


@dataclass(frozen=True, slots=True)
class Stream(WireRecord):
    """Text that a rank wrote.

    Attributes:
        name: The stream it was written to.
        text: The text.
        position: The end of the text, in bytes from the stream's beginning; 0 if bytes are not counted.
    """

    name: StreamName
    text: str
    position: int = 0


@dataclass(frozen=True, slots=True)
class Display(WireRecord):
    """Something a rank displayed: a Jupyter mime bundle.

    Attributes:
        action: ``display`` shows it, ``update`` replaces the display of the same ``display_id``, ``clear`` clears the
            rank's output in the cell, ``value`` is the display of the cell's last expression.
        data: Mime type to data.
        metadata: Jupyter's metadata for the bundle.
        display_id: Names the display for later updates.
        wait: For ``clear``: wait until the next output comes.
    """

    action: Literal["display", "update", "clear", "value"]
    data: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str | None = None
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Output(WireRecord):
    """Output of a rank, in order."""

    rank: int
    run_id: int
    items: tuple[Stream | Display, ...]


@dataclass(frozen=True, slots=True)
class Begun(WireRecord):
    """The collectives and groups that a run has begun on this rank.

    Attributes:
        counts: Number of collectives and messages by the name of the process group. Unless groups have changed, only those of this
            run.
        ranks: Global ranks of each of these groups.
        group_count: Torch's counter for the names of new groups at the end of the run.
    """

    counts: dict[str, int]
    ranks: dict[str, tuple[int, ...]]
    group_count: int


@dataclass(frozen=True, slots=True)
class Result(WireRecord):
    """A run finished on this rank.

    Attributes:
        payload: The run's return value.
        begun: The collectives and groups that it began; None if there were none.
    """

    rank: int
    run_id: int
    payload: Payload | None
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Failed(WireRecord):
    """A run ended badly on this rank.

    Attributes:
        failure: What happened, for people.
        group_lost: Whether this rank's process groups are broken and must be rebuilt before the next collective.
        cut_off: Whether the error says only that another rank has left the collective: a consequence, not a cause.
    """

    rank: int
    run_id: int
    failure: RankFailure
    group_lost: bool = False
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Bye(WireRecord):
    """The worker is ending by itself."""

    rank: int


@dataclass(frozen=True, slots=True)
class Aborted(WireRecord):
    """Answer to Abort: the process groups of this rank are aborted."""

    rank: int
    run_id: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Inspection(WireRecord):
    """Answer to Inspect.

    Attributes:
        rank: The rank.
        request_id: The number of the request.
        report: The rank's current activity; see :mod:`labkit.worker.run.introspection`.
    """

    rank: int
    request_id: int
    report: RankReport


@dataclass(frozen=True, slots=True)
class RecordedCollective(WireRecord):
    """One collective as torch's flight recorder describes it.

    Attributes:
        sequence: Its number within its process group, from 1.
        name: For example ``all_reduce``.
        backend: The backend that recorded it, ``gloo`` or ``nccl``; each counts separately, even within one group.
        group: Name of the process group, ``0`` or ``default_pg`` for the default one.
        sizes: Shapes of the inputs.
        dtypes: Their dtypes.
        done: Whether the rank has left it.
        where: The line of user code that called it, while it is not done; empty if no user code did.
        code: That line's text.
    """

    sequence: int
    name: str
    group: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    done: bool = False
    backend: str = ""
    where: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class TaskReport(WireRecord):
    """The progress of a long task; see :mod:`labkit.base.progress`.

    Attributes:
        title: The task's name.
        done_bytes: The number of bytes processed so far.
        total_bytes: The number of bytes to process; None if that is not known.
    """

    title: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class RankReport(WireRecord):
    """The activity of one rank at one moment.

    Attributes:
        run_id: The run it works on, or None when it is idle.
        busy_s: Seconds since that run began here.
        where: The innermost frame of the user's own code, for example ``Cell In[7], line 5``.
        function: The function's name at that frame.
        code: The source line there.
        innermost: The innermost Python frame of all, ``file:line function``; it shows whether the rank waits in a library or works.
        in_collective: Whether the main thread waits inside a collective, or for the device behind one.
        waits_in: The torch function it waits in, for example ``all_reduce``; empty if it does not wait.
        partner: The rank that this call names as its source or destination; None if it names none.
        cpu_s: CPU seconds of the process without its control thread; two inspections show whether a rank computes or waits.
        collectives: The most recent collectives on the present process groups, oldest first; at least the last one of each group.
        groups: Global ranks of each process group by the group's name.
        begun: Number of collectives and messages begun on each group; equal numbers in two reports mean no progress.
        group_count: Torch's counter for the names of new groups.
        threads: Number of Python threads.
        others_at_work: Whether another thread of the user's code is running; it may be about to begin a collective.
        task: The rank's report on its long task, or None.
    """

    run_id: int | None
    busy_s: float = 0.0
    where: str = ""
    function: str = ""
    code: str = ""
    innermost: str = ""
    in_collective: bool = False
    waits_in: str = ""
    partner: int | None = None
    cpu_s: float = 0.0
    collectives: tuple[RecordedCollective, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    group_count: int = 0
    threads: int = 1
    others_at_work: bool = False
    task: TaskReport | None = None


ToMain = Execute | Shutdown
ToControl = Interrupt | Abort | Inspect | Release
FromWorker = Ready | Output | Result | Failed | Bye | Aborted | Inspection
