"""The living ranks of a pool: their processes, their wire, their deaths."""

from __future__ import annotations

import functools
import itertools
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from labkit.base.limits import LIMITS
from labkit.controller.machines.nodes_world import NodesWorld
from labkit.controller.run.run import Run
from labkit.controller.start.deaths import LastWords, describe_exit
from labkit.controller.start.launchers.launcher import WorkerExit
from labkit.controller.start.world import World
from labkit.errors import RankFailure, WorkerStartError
from labkit.wire.messages import (
    Aborted,
    Bye,
    Failed,
    FromWorker,
    GroupSpec,
    Output,
    Ready,
    Shutdown,
    ToControl,
    ToMain,
)
from labkit.wire.node_messages import Left
from labkit.wire.transport import Channel


class Members:
    """The ranks of one pool, from start to close.

    Args:
        world_size: Number of ranks.
        world: The world in which they run.

    Attributes:
        pids: Process id of each rank, on its machine.
        hosts: Name of the machine of each rank.
        deaths: For each rank whose process has ended, what is known about its death.
    """

    def __init__(self, world_size: int, world: World) -> None:
        self._world_size, self._world = world_size, world
        self._generation = 0
        self._exits: queue.SimpleQueue[tuple[int, int, WorkerExit]] = queue.SimpleQueue()
        self._lives = itertools.count()
        # A late report of a process that was replaced must not count for its replacement.
        self._running: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._last_words = LastWords()
        self._ended: dict[int, str] = {}  # why labkit itself has ended a rank
        self._unready: set[tuple[int, Channel]] = set()
        self._run: Run | None = None
        self._left: set[int] = set()
        self.pids: dict[int, int] = {}
        self.hosts: dict[int, str] = {}
        self.deaths: dict[int, RankFailure] = {}

    @property
    def share_memory(self) -> bool:
        """True if large buffers travel as memory files."""
        return self._world.share_memory

    @property
    def places(self) -> Mapping[int, str]:
        """The machine of each rank, if there is more than one machine."""
        return self._world.places

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """All ranks whose process runs."""
        return tuple(rank for rank in range(self._world_size) if rank not in self.deaths)

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """All ranks whose process has ended."""
        return tuple(sorted(self.deaths))

    # ---- start and end -------------------------------------------------------------------------------------------

    def start(self, timeout_s: float, stop_if_asked: Callable[[], None]) -> None:
        """Start every rank and wait until all are ready.

        Args:
            timeout_s: The longest time to wait.
            stop_if_asked: Called at points where the start can be interrupted; it may raise.

        Raises:
            WorkerStartError: A rank ended or the time passed. Nothing is left running.
        """
        try:
            group = self._world.group(0)
            for rank in range(self._world_size):
                self._start_worker(rank, group)
                stop_if_asked()
            self.await_ready(timeout_s, stop_if_asked)
        except BaseException:
            self.close(kill=True)
            raise

    def adopt(self, left: Mapping[int, Left], world: NodesWorld, hosts: Mapping[int, str]) -> None:
        """Adopt ranks that an earlier notebook left running. A rank that is missing among them counts as dead.

        Args:
            left: The ranks that run on each machine, by node rank.
            world: The world of these ranks; it must be the world of this object.
            hosts: The machines' names, by node rank.
        """
        for node_rank, found in left.items():
            for handle, rank, pid in found.ranks:
                life = next(self._lives)
                self._running[rank], self._handles[rank] = life, handle
                self.pids[rank], self.hosts[rank] = pid, hosts[node_rank]
                world.adopt(node_rank, handle, functools.partial(self._on_exit, rank, life))
        self._generation = max(found.generation for found in left.values())
        for rank in set(range(self._world_size)) - set(self._running):
            gone = "it ended while no notebook was attached"
            self.deaths[rank] = RankFailure(rank, "died", "unseen", gone)

    def start_again(self, ranks: Iterable[int], group: GroupSpec) -> None:
        """Replace the processes of these ranks, living or dead, by new ones. The new ones wait for the others at ``group``.

        Blocks for at most 2 x ``end_s``; :meth:`await_ready` waits for the new processes.
        """
        ended = [rank for rank in ranks if rank not in self.deaths]
        self._world.wire.send(ended, "main", Shutdown())
        self._await_end(ended, LIMITS.end_s)
        self._kill(ended)
        self._await_end(ended, LIMITS.end_s)
        started: list[int] = []
        try:
            for rank in ranks:
                self._start_worker(rank, group, joining=True)
                started.append(rank)
        except BaseException:
            self._kill(started)
            raise
        for rank in started:
            self.deaths.pop(rank, None)
            self._ended.pop(rank, None)

    def give_up(self, ranks: Sequence[int], why: str) -> None:
        """Kill new ranks that failed to join the others; they count as dead. Blocks for at most ``end_s``.

        Args:
            ranks: The ranks.
            why: The cause to report for their deaths.
        """
        self._ended |= dict.fromkeys(ranks, why)
        deadline = time.monotonic() + LIMITS.end_s
        self._kill(ranks)
        while not self._running.keys().isdisjoint(ranks) and time.monotonic() < deadline:
            self.receive(0.02)

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._running:
                self._world.kill(self._handles[rank])

    def _await_end(self, ranks: Sequence[int], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._running.keys().isdisjoint(ranks) and time.monotonic() < deadline:
            self._world.wire.receive(0.02)
            self._drain_exits()

    def _start_worker(self, rank: int, group: GroupSpec, *, joining: bool = False) -> None:
        self._last_words.forget(rank)
        life = next(self._lives)
        self._running[rank] = life
        try:
            self._handles[rank] = self._world.start(rank, group, functools.partial(self._on_exit, rank, life), joining=joining)
        except BaseException:
            del self._running[rank]
            raise
        self._unready |= {(rank, "main"), (rank, "control")}

    def await_ready(self, timeout_s: float, stop_if_asked: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank that was started is ready.

        Raises:
            WorkerStartError: A rank ended, or the time passed.
        """
        deadline = time.monotonic() + timeout_s
        while self._unready:
            if time.monotonic() > deadline:
                raise WorkerStartError(f"it was not ready after {timeout_s:g} s", rank=min(self._unready)[0])
            self._take_note(self._world.wire.receive(0.2))
            self._refuse_early_exits()
            stop_if_asked()

    def _take_note(self, received: list[tuple[FromWorker, list[bytes]]]) -> None:
        """Record what concerns the members themselves: readiness at the start, and last output for the report of a death."""
        for message, _ in received:
            if isinstance(message, Ready):
                self._unready.discard((message.rank, "main"))
                self.pids[message.rank], self.hosts[message.rank] = message.pid, message.hostname
            elif isinstance(message, Aborted) and message.run_id == 0:
                self._unready.discard((message.rank, "control"))
            elif isinstance(message, Output):
                self._last_words.hear(message)

    def _refuse_early_exits(self) -> None:
        self.note_deaths()
        for rank, death in self.deaths.items():
            raise WorkerStartError(death.message, rank=rank, exitcode=death.exitcode, stderr_tail=death.last_output)

    def close(self, *, kill: bool = False) -> None:
        """End the workers: ask them, wait at most ``end_s``, then kill the rest."""
        if not kill:
            self._world.wire.send(self.all_ranks, "main", Shutdown())
        deadline = time.monotonic() + (0.0 if kill else LIMITS.end_s)
        while self._running and time.monotonic() < deadline:
            for message, _ in self._world.wire.receive(0.05):
                if isinstance(message, Bye):
                    self._left.add(message.rank)
            self._drain_exits()
        self._kill(tuple(self._running))
        self._await_end(tuple(self._running), LIMITS.end_s)
        self._world.close()

    def _drain_exits(self) -> list[tuple[int, WorkerExit]]:
        found = []
        while not self._exits.empty():
            rank, life, event = self._exits.get()
            if self._running.get(rank) == life:
                del self._running[rank]
                found.append((rank, event))
        return found

    def _on_exit(self, rank: int, life: int, event: WorkerExit) -> None:
        """Record an exit. The launcher's thread calls this."""
        self._exits.put((rank, life, event))
        self._world.wire.wake()

    # ---- messages ------------------------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """Begin a run. From now on deaths count as its failures, and the last output of a rank is what it writes from now on."""
        self._run = run
        self._last_words.begin_run()

    def next_group(self) -> GroupSpec:
        """Return the place where the ranks meet to form new process groups."""
        self._generation += 1
        return self._world.group(self._generation)

    def send_work(self, ranks: Sequence[int], message: ToMain, frames: Sequence[Any] = ()) -> None:
        """Send work to the main threads of ranks."""
        self._world.wire.send(ranks, "main", message, frames)

    def send_control(self, rank: int, message: ToControl) -> None:
        """Send a message to a rank's control thread. A rank that has ended gets nothing."""
        self._world.wire.send((rank,), "control", message)

    def kill(self, rank: int) -> None:
        """Kill a rank that does not answer, with all processes it has started."""
        self._ended[rank] = "labkit killed it because it did not answer"
        self._kill((rank,))

    def wake(self) -> None:
        """Make :meth:`receive` return. Safe from signal handlers and threads."""
        self._world.wire.wake()

    def receive(self, timeout_s: float) -> list[tuple[FromWorker, list[bytes]]]:
        """Wait for messages. For a rank that died, add the Output that its pipe still held and the missing Failed."""
        received = self._world.wire.receive(timeout_s)
        self._take_note(received)
        if not self._exits.empty():
            # Messages that a rank sent before it died are still in the socket; read them first.
            deadline = time.monotonic() + LIMITS.last_messages_s
            while time.monotonic() < deadline and (more := self._world.wire.receive(0.05)):
                self._take_note(more)
                received += more
            received += [(message, []) for message in self.note_deaths()]
        return received

    def look(self) -> None:
        """Check whether the ranks' machines have changed while nothing waited for messages."""
        self._world.look()

    @property
    def has_exits(self) -> bool:
        """True if any rank has exited since the last check."""
        return not self._exits.empty()

    def note_deaths(self) -> list[FromWorker]:
        """Record ranks that have ended. Return the messages that report this to the present run."""
        told: list[FromWorker] = []
        for rank, event in self._drain_exits():
            run_id = self._run.run_id if self._run is not None else 0
            items, lost = self._last_words.unsent(rank, event)
            if items:
                output = Output(rank, run_id, items)
                self._last_words.hear(output)
                told.append(output)
            self.deaths[rank] = self._death(rank, event, lost)
            told.append(Failed(rank, run_id, self.deaths[rank], group_lost=True))
        return told

    def _death(self, rank: int, event: WorkerExit, lost_bytes: int) -> RankFailure:
        name, message = describe_exit(event)
        message = self._ended.get(rank, message)
        if lost_bytes:
            message += f"; {lost_bytes:,} bytes of its output are lost with it"
        code = None if event.cause else event.exitcode
        return RankFailure(rank, "died", name, message, exitcode=code, last_output=self._last_words.of(rank))
