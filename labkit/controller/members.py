"""The living ranks of a pool: their processes, their wire, their deaths."""

from __future__ import annotations

import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from labkit.controller import memory
from labkit.controller.deaths import LastWords, describe_exit
from labkit.controller.launchers.fork_server import ForkServer
from labkit.controller.launchers.launcher import Launcher, WorkerExit
from labkit.controller.plan import PoolPlan
from labkit.controller.run import Run
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
from labkit.wire.spec import WorkerSpec
from labkit.wire.transport import Channel, ControllerWire, Keys

END_S = 2.0
# How long a death's report may wait for what the dead rank had sent, while other ranks keep the socket busy.
LAST_MESSAGES_S = 0.2


class Members:
    """The ranks of one pool from start to close.

    Args:
        plan: What to start.
        launcher: Starts the processes.
    """

    def __init__(self, plan: PoolPlan, launcher: Launcher) -> None:
        self._plan, self._launcher = plan, launcher
        self._directory = self._make_directory()
        self._wire = ControllerWire(f"ipc://{self._directory}", Keys.generate())
        self._generation = 0
        self._exits: queue.SimpleQueue[WorkerExit] = queue.SimpleQueue()
        self._ranks_by_pid: dict[int, int] = {}
        self._last_words = LastWords()
        self._killed: set[int] = set()
        self._unready: set[tuple[int, Channel]] = set()
        self._oom_kills = memory.oom_kills()
        self._run: Run | None = None
        self._left: set[int] = set()
        self.pids: dict[int, int] = {}
        self.deaths: dict[int, RankFailure] = {}

    def _make_directory(self) -> str:
        """The pool's private directory (mode 0700): its sockets and the ranks' meeting places."""
        base = tempfile.gettempdir()
        # Unix socket paths have at most 108 bytes.
        directory = tempfile.mkdtemp(prefix="labkit-", dir=base if len(base) < 60 else "/tmp")
        if isinstance(self._launcher, ForkServer):
            self._launcher.guard_directory(directory)
        return directory

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        if isinstance(self._launcher, ForkServer) and self._launcher.alive:
            self._launcher.forget_directory(self._directory)

    @property
    def share_memory(self) -> bool:
        """Whether large buffers travel as memory files."""
        return self._wire.endpoint.same_machine

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Every rank that lives."""
        return tuple(rank for rank in range(self._plan.world_size) if rank not in self.deaths)

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Every rank whose process has ended."""
        return tuple(sorted(self.deaths))

    # ---- start and end -------------------------------------------------------------------------------------------

    def start(self, timeout_s: float, stop_if_asked: Callable[[], None]) -> None:
        """Start every rank and wait until all are ready.

        Args:
            timeout_s: The longest time to wait.
            stop_if_asked: Called where the start can be broken off; it may raise.

        Raises:
            WorkerStartError: One ended or the time passed; nothing is left running.
        """
        try:
            group = GroupSpec(os.path.join(self._directory, "store-0"), 0, self._plan.world_size)
            for rank in range(self._plan.world_size):
                self._start_worker(self._spec(rank, group))
                stop_if_asked()
            self.await_ready(timeout_s, stop_if_asked)
        except BaseException:
            self.close(kill=True)
            raise

    def start_again(self, ranks: Iterable[int], group: GroupSpec) -> None:
        """Start new processes in the place of these ranks, living or dead. They wait for the others at ``group``.

        Blocks for at most 2 x END_S; :meth:`await_ready` waits for the new processes.
        """
        ended = [rank for rank in ranks if rank not in self.deaths]
        for rank in ended:
            self._wire.send(rank, "main", Shutdown())
        self._await_end(ended, END_S)
        for rank in ended:
            self._launcher.kill(self.pids[rank])
        self._await_end(ended, END_S)
        for rank in ranks:
            self.deaths.pop(rank, None)
            self._killed.discard(rank)
            self._start_worker(self._spec(rank, group, joining=True))

    def give_up(self, ranks: Iterable[int]) -> None:
        """Kill ranks that did not find their place among the others; they count as dead. Blocks for at most END_S."""
        deadline = time.monotonic() + END_S
        for rank in ranks:
            self._launcher.kill(self.pids[rank])
        while any(self.pids[rank] in self._ranks_by_pid for rank in ranks) and time.monotonic() < deadline:
            self.receive(0.02)

    def _await_end(self, ranks: Sequence[int], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(self.pids[rank] in self._ranks_by_pid for rank in ranks) and time.monotonic() < deadline:
            self._wire.receive(0.02)
            self._drain_exits()

    def _start_worker(self, spec: WorkerSpec) -> None:
        self._last_words.forget(spec.rank)
        pid = self._launcher.start(spec, self._on_exit)
        self.pids[spec.rank] = pid
        self._ranks_by_pid[pid] = spec.rank
        self._unready |= {(spec.rank, "main"), (spec.rank, "control")}

    def _spec(self, rank: int, group: GroupSpec, *, joining: bool = False) -> WorkerSpec:
        environ = dict(os.environ)
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
        environ.setdefault("MASTER_PORT", "29500")
        environ.setdefault("OMP_NUM_THREADS", "1")
        # The flight recorder is what diagnosis reads; torch keeps one on CUDA only when asked before the group exists.
        environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
        # NCCL's monitor ends a process whose collectives it finds stuck, and writes pages about groups that were aborted.
        environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        return WorkerSpec(
            rank=rank,
            local_rank=rank,
            local_world_size=self._plan.world_size,
            device=self._plan.device,
            endpoint=self._wire.endpoint,
            group=group,
            environ=environ,
            cwd=os.getcwd(),
            sys_path=tuple(path or os.getcwd() for path in sys.path),
            joining=joining,
        )

    def await_ready(self, timeout_s: float, stop_if_asked: Callable[[], None] = lambda: None) -> None:
        """Wait until every rank that was started is ready.

        Raises:
            WorkerStartError: One ended, or the time passed.
        """
        deadline = time.monotonic() + timeout_s
        while self._unready:
            if time.monotonic() > deadline:
                raise WorkerStartError(f"it was not ready after {timeout_s:g} s", rank=min(self._unready)[0])
            self._take_note(self._wire.receive(0.2))
            self._refuse_early_exits()
            stop_if_asked()

    def _take_note(self, received: list[tuple[FromWorker, list[bytes]]]) -> None:
        """What concerns the members themselves: signs of life at the start, and last words for the report of a death."""
        for message, _ in received:
            if isinstance(message, Ready):
                self._unready.discard((message.rank, "main"))
            elif isinstance(message, Aborted) and message.run_id == 0:
                self._unready.discard((message.rank, "control"))
            elif isinstance(message, Output):
                self._last_words.hear(message)

    def _refuse_early_exits(self) -> None:
        self.note_deaths()
        for rank, death in self.deaths.items():
            raise WorkerStartError(death.message, rank=rank, exitcode=death.exitcode, stderr_tail=death.last_output)

    def close(self, *, kill: bool = False) -> None:
        """End the workers: ask, wait at most END_S, kill the rest."""
        if not kill:
            for rank in self.all_ranks:
                self._wire.send(rank, "main", Shutdown())
        deadline = time.monotonic() + (0.0 if kill else END_S)
        while self._alive() and time.monotonic() < deadline:
            for message, _ in self._wire.receive(0.05):
                if isinstance(message, Bye):
                    self._left.add(message.rank)
            self._drain_exits()
        for pid in self._alive():
            self._launcher.kill(pid)
        deadline = time.monotonic() + END_S
        while self._alive() and time.monotonic() < deadline:
            self._wire.receive(0.02)
            self._drain_exits()
        self._wire.close()
        self._remove_directory()

    def _alive(self) -> list[int]:
        return list(self._ranks_by_pid)

    def _drain_exits(self) -> list[tuple[int, WorkerExit]]:
        found = []
        while not self._exits.empty():
            event = self._exits.get()
            rank = self._ranks_by_pid.pop(event.pid, None)
            if rank is not None:
                found.append((rank, event))
        return found

    def _on_exit(self, event: WorkerExit) -> None:
        """Called from the launcher's thread."""
        self._exits.put(event)
        self._wire.wake()

    # ---- messages ------------------------------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """A run begins; deaths from now on are failures of it, and what a rank writes from now on is its last output."""
        self._run = run
        self._last_words.begin_run()

    def next_group(self) -> GroupSpec:
        """Where the ranks meet to form new process groups."""
        self._generation += 1
        return GroupSpec(os.path.join(self._directory, f"store-{self._generation}"), self._generation, self._plan.world_size)

    def send_work(self, rank: int, message: ToMain, frames: Sequence[Any] = ()) -> None:
        """Give a rank work."""
        self._wire.send(rank, "main", message, frames)

    def send_control(self, rank: int, message: ToControl) -> None:
        """Speak to a rank's control thread. A rank that is gone hears nothing."""
        self._wire.send(rank, "control", message)

    def kill(self, rank: int) -> None:
        """Kill a rank that does not answer, with all that it started."""
        self._killed.add(rank)
        self._launcher.kill(self.pids[rank])

    def wake(self) -> None:
        """Make :meth:`receive` return. Safe from signal handlers and threads."""
        self._wire.wake()

    def receive(self, timeout_s: float) -> list[tuple[FromWorker, list[bytes]]]:
        """Wait for messages; a death gives the Output that the pipe still held, and the missing Failed."""
        received = self._wire.receive(timeout_s)
        self._take_note(received)
        if not self._exits.empty():
            # What a rank sent before it died is still on its way through the socket; it comes first.
            deadline = time.monotonic() + LAST_MESSAGES_S
            while time.monotonic() < deadline and (more := self._wire.receive(0.05)):
                self._take_note(more)
                received += more
            received += [(message, []) for message in self.note_deaths()]
        return received

    @property
    def has_exits(self) -> bool:
        """Whether ranks have ended of which no note has been taken."""
        return not self._exits.empty()

    def note_deaths(self) -> list[FromWorker]:
        """Take note of ranks that have ended; what to tell the present run about them."""
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
        name, message = describe_exit(event.exitcode)
        if rank in self._killed:
            message = "labkit killed it because it did not answer"
        elif name == "SIGKILL":
            cause = "the system killed it because memory ran out" if memory.oom_kills() > self._oom_kills else message
            message = f"{cause}; {memory.describe(event.peak_bytes)}"
        if lost_bytes:
            message += f"; {lost_bytes:,} bytes of its output are lost with it"
        return RankFailure(rank, "died", name, message, exitcode=event.exitcode, last_output=self._last_words.of(rank))
