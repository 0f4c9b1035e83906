"""The messages between controller and workers.

Per rank the events follow one grammar: ``Ready ( Output* (Result | Failed) )* Bye``. There is exactly one terminal
message (Result or Failed) for each run and rank, and it comes after all of that run's output. When a worker dies the
controller writes the missing Failed itself, so there is one code path for every way a run can end.

Messages hold built-in types only. What users send (functions, arguments, values) travels as a packed payload inside
them, so a payload that cannot be unpacked is an error of that run and not of the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from labkit.errors import RankFailure
from labkit.wire.payload import Payload
from labkit.wire.record import Record

StreamName = Literal["stdout", "stderr"]


# ---- controller to worker, main thread -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Execute(Record):
    """Run something on this rank.

    Attributes:
        run_id: Counts the pool's runs from 1.
        ranks: All the ranks of the run.
        kind: ``cell`` runs ``source``; ``call`` runs the packed ``(function, args, kwargs)``; ``push`` stores the
            packed dict of variables; ``pull`` returns the value of the expression in ``source``; ``rebuild`` makes new
            process groups and mends what stood on the old ones; ``ask`` says what keeps new ranks from joining.
        source: Python source for ``cell`` and ``pull``.
        payload: What ``call`` and ``push`` need.
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
class Shutdown(Record):
    """End the worker after the message before it."""


@dataclass(frozen=True, slots=True)
class GroupSpec(Record):
    """How ranks find each other to form the default process group.

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
class Interrupt(Record):
    """Raise KeyboardInterrupt in the main thread if it still works on ``run_id``."""

    run_id: int


@dataclass(frozen=True, slots=True)
class Abort(Record):
    """Free the main thread from native collectives: abort this rank's process groups."""

    run_id: int


@dataclass(frozen=True, slots=True)
class Inspect(Record):
    """Report what this rank does now."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Release(Record):
    """The controller has read the buffers of ``run_id``'s result; they can be freed."""

    run_id: int


# ---- worker to controller --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready(Record):
    """This rank has a process group and has completed a collective."""

    rank: int
    pid: int
    hostname: str
    device: str


@dataclass(frozen=True, slots=True)
class Stream(Record):
    """Text that a rank wrote.

    Attributes:
        name: Where it wrote it.
        text: The text.
        position: Where it ends, in bytes from the stream's beginning; 0 where nobody counts.
    """

    name: StreamName
    text: str
    position: int = 0


@dataclass(frozen=True, slots=True)
class Display(Record):
    """Something a rank displayed: a Jupyter mime bundle.

    Attributes:
        action: ``display`` shows it, ``update`` replaces the display of the same ``display_id``, ``clear`` clears the
            rank's output in the cell, ``value`` is the display of the cell's last expression.
        data: Mime type to data.
        metadata: Jupyter's metadata for the bundle.
        display_id: Names the display for later updates.
        wait: For ``clear``: only when the next output comes.
    """

    action: Literal["display", "update", "clear", "value"]
    data: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str | None = None
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Output(Record):
    """What a rank put out, in order."""

    rank: int
    run_id: int
    items: tuple[Stream | Display, ...]


@dataclass(frozen=True, slots=True)
class Begun(Record):
    """The collectives and groups that a run has begun on this rank.

    Attributes:
        counts: Number of collectives and messages by the name of the process group; without a change of groups those of this run.
        ranks: Global ranks of each of these groups.
        group_count: Torch's counter for the names of new groups, when the run had ended.
    """

    counts: dict[str, int]
    ranks: dict[str, tuple[int, ...]]
    group_count: int


@dataclass(frozen=True, slots=True)
class Result(Record):
    """A run finished on this rank.

    Attributes:
        payload: The value that it returns.
        begun: What it began in process groups; None where that is nothing.
    """

    rank: int
    run_id: int
    payload: Payload | None
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Failed(Record):
    """A run ended badly on this rank.

    Attributes:
        failure: What happened, for people.
        group_lost: This rank's process groups are broken and must be rebuilt before the next collective.
        cut_off: The error says only that another rank has left the collective; it is a consequence, not a cause.
    """

    rank: int
    run_id: int
    failure: RankFailure
    group_lost: bool = False
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Bye(Record):
    """The worker ends by itself."""

    rank: int


@dataclass(frozen=True, slots=True)
class Aborted(Record):
    """Answer to Abort: the process groups are gone on this rank."""

    rank: int
    run_id: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Inspection(Record):
    """Answer to Inspect.

    Attributes:
        rank: The rank.
        request_id: The question's number.
        report: What the rank does; see :mod:`labkit.worker.introspection`.
    """

    rank: int
    request_id: int
    report: RankReport


@dataclass(frozen=True, slots=True)
class Collective(Record):
    """One collective as torch's flight recorder knows it.

    Attributes:
        sequence: Its number within its process group, from 1.
        name: For example ``all_reduce``.
        backend: Whose record it is, ``gloo`` or ``nccl``; each counts for itself, also within one group.
        group: Name of the process group, ``0`` or ``default_pg`` for the default one.
        sizes: Shapes of the inputs.
        dtypes: Their dtypes.
        done: The rank has left it.
        where: The reader's line that called it, while it is not done; empty where no line of the reader's did.
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
class TaskReport(Record):
    """How far something is that takes long; see :mod:`labkit.progress`.

    Attributes:
        title: What it is.
        done_bytes: How many bytes it has done.
        total_bytes: Of how many; None when that is not known.
    """

    title: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class RankReport(Record):
    """What one rank does at one moment.

    Attributes:
        run_id: The run it works on, or None when it is idle.
        busy_s: Seconds since that run began here.
        where: The innermost frame of the user's own code, for example ``Cell In[7], line 5``.
        function: The function's name at that frame.
        code: The source line there.
        innermost: The innermost Python frame of all, ``file:line function``; it tells waiting in a library from work.
        in_collective: The main thread waits inside a collective, or for the device behind one.
        waits_in: The torch function it waits in, for example ``all_reduce``; empty when it does not.
        partner: The rank that this call names as its source or destination; None where it names none.
        cpu_s: CPU seconds of the process but for its control thread; two inspections tell a computing rank from a waiting one.
        collectives: The most recent collectives on the present process groups, oldest first; at least the last one of each group.
        groups: Global ranks of each process group by the group's name.
        begun: How many collectives and messages have begun on each group; equal numbers in two reports mean no progress.
        group_count: Torch's counter for the names of new groups.
        threads: Number of Python threads.
        others_at_work: A thread of the reader's other than the main one is at work; it may be about to begin a collective.
        task: What it says of its progress, or None.
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
    collectives: tuple[Collective, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    group_count: int = 0
    threads: int = 1
    others_at_work: bool = False
    task: TaskReport | None = None


ToMain = Execute | Shutdown
ToControl = Interrupt | Abort | Inspect | Release
FromWorker = Ready | Output | Result | Failed | Bye | Aborted | Inspection
