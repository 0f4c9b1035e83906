"""Execution of work on the ranks: send it, wait for it, repair what it has broken, and raise the error if it failed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from labkit.base.plain_text import format_ranks, name_ranks
from labkit.base.ranks import RankResults
from labkit.controller.hang import leftovers
from labkit.controller.hang.diagnosis import Diagnosis
from labkit.controller.hang.verdict import judge
from labkit.controller.output import Screen, present_screen
from labkit.controller.run.interrupts import caught_sigint
from labkit.controller.run.members import Members
from labkit.controller.run.rank_output import RankOutput
from labkit.controller.run.repair import Repair
from labkit.controller.run.reports import raise_for
from labkit.controller.run.run import Run, RunWait
from labkit.errors import PoolStateError, WireError
from labkit.wire.messages import Execute, Output, RankReport, Release, Result
from labkit.wire.payload import Packed, unpack


class Runner:
    """Runs one piece of work at a time on the members of a pool.

    Args:
        members: The living ranks.
        world_size: Number of ranks in the pool.

    Attributes:
        members: The living ranks.
    """

    def __init__(self, members: Members, world_size: int) -> None:
        self.members, self._world_size = members, world_size
        self._busy = threading.Lock()
        self._count = 0
        self._waiting: RunWait | None = None
        self._sigint = False
        self._to_release: list[tuple[int, int]] = []
        self._repair = Repair(members, world_size, self._begin, self.values)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads from starting a run.

        Raises:
            PoolStateError: A run is in progress.
        """
        if not self._busy.acquire(blocking=False):
            raise PoolStateError("a run is in progress on this pool, and it takes one at a time. Wait, or call pool.interrupt().")
        try:
            yield
        finally:
            self._busy.release()

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks whose process has ended. While a run is in progress: those whose end the run knows."""
        # A death is reported once, and a run in progress must be the one that gets the report.
        if self.members.has_exits:  # otherwise this, in another thread, could block a run that begins
            with contextlib.suppress(PoolStateError), self.alone():
                self.members.note_deaths()
        return self.members.dead_ranks

    def look_around(self) -> None:
        """Record what has happened while no run was in progress. Do nothing while one is."""
        with contextlib.suppress(PoolStateError), self.alone():
            self.members.look()

    def refuse_dead(self, ranks: Sequence[int]) -> None:
        """Refuse work for a rank that is dead.

        Args:
            ranks: The ranks that are to work.

        Raises:
            PoolStateError: A rank is dead; the message names the dead ranks and the ways to go on.
        """
        dead = self.dead_ranks
        if not set(dead).isdisjoint(ranks):
            are = "is" if len(dead) == 1 else "are"
            cause = self.members.deaths[dead[0]].message
            living = tuple(rank for rank in range(self._world_size) if rank not in dead)
            with contextlib.suppress(PoolStateError), self.alone():
                self._repair.find_obstacle()
            look = ""
            if living:
                verb, their = ("is", "its") if len(living) == 1 else ("are", "their")
                first = f"read {their} variables first with %%spmd --ranks {format_ranks(living).replace(' ', '')}"
                look = f" {name_ranks(living).capitalize()} {verb} alive; {first}."
            raise PoolStateError(f"{name_ranks(dead)} {are} dead ({cause}). {self._repair.ways_back(dead)}{look}")

    def execute(
        self,
        kind: Literal["cell", "call", "push", "pull"],
        ranks: tuple[int, ...],
        timeout_s: float | None,
        *,
        packed: Packed | None = None,
        screen: Screen | None = None,
        **fields: Any,
    ) -> Run:
        """Send one piece of work and wait until every rank has ended it.

        Args:
            kind: See :class:`labkit.wire.messages.Execute`.
            ranks: The ranks to run it on.
            timeout_s: Interrupt it after this many seconds.
            packed: Its payload, which this function closes.
            screen: The screen for the ranks' output; None for the running cell or the terminal.
            **fields: Further fields of the message.

        Returns:
            The run, finished on every rank.

        Raises:
            RunReport: The run did not finish on every rank.
            PoolStateError: A run is in progress, or a rank is dead.
        """
        try:
            self.refuse_dead(ranks)
            # An interrupt from here to the end of the repair would leave ranks at work or groups broken.
            with self.alone(), self._sigint_stops_the_run():
                self._send_releases()
                run = self._begin(ranks)
                message = Execute(run.run_id, ranks, kind, payload=packed.payload if packed is not None else None, **fields)

                def send() -> None:
                    self.members.send_work(ranks, message, packed.frames if packed is not None else ())

                self._wait(run, timeout_s, send, screen or present_screen(self.members.places))
                self._repair.mend(run)
        finally:
            if packed is not None:
                packed.close()
        if run.failures or run.left_open or self._sigint:
            for rank, (result, _) in run.results.items():
                self._release(rank, result)  # nothing will read it
        raise_for(run, timeout_s, self._repair.ways_back(self.members.dead_ranks))
        if self._sigint:
            raise KeyboardInterrupt
        return run

    def _begin(self, ranks: tuple[int, ...]) -> Run:
        self._count += 1
        run = Run(self._count, ranks)
        self.members.begin(run)
        return run

    def resume(self, run_id: int, ranks: tuple[int, ...]) -> None:
        """Take over from an earlier notebook: continue its count of runs, and wait for a run in progress, showing its output.

        Args:
            run_id: The last run that was requested.
            ranks: The ranks that have not ended it.

        Raises:
            RunReport: The run did not finish on every one of these ranks.
        """
        self._count = run_id
        if not ranks:
            return
        with self.alone(), self._sigint_stops_the_run():
            run = Run(run_id, ranks)
            self.members.begin(run)
            self._wait(run, None, lambda: None, present_screen(self.members.places))
            self._repair.mend(run)
        raise_for(run, None, self._repair.ways_back(self.members.dead_ranks))

    def _wait(self, run: Run, timeout_s: float | None, send: Callable[[], None], screen: Screen) -> None:
        output = RankOutput(screen, run.run_id, label=self._world_size > 1)

        def show(message: Output) -> None:
            output.feed(message.rank, message.items)

        def show_hang(diagnosis: Diagnosis) -> None:
            screen.display({"text/plain": str(diagnosis), "text/html": diagnosis._repr_html_()}, {}, None, False)

        self._waiting = waiting = RunWait(run, self.members, timeout_s, show, output.tick, show_hang)
        try:
            if self._sigint:
                self._sigint = False
                self.interrupt()
            send()  # only now: an interrupt after the first sign of life must find whom to interrupt
            waiting.wait()
            self._waiting = None
            self._look_for_leftovers(waiting)
        finally:
            self._waiting = None
            output.finish()
        if run.uneven:
            screen.text("stderr", f"{run.uneven}\n")

    def _look_for_leftovers(self, waiting: RunWait) -> None:
        """Find what a run that ended well on all ranks has left open between them."""
        run, all_ranks = waiting.run, self.members.all_ranks
        begun = {rank: result.begun for rank, (result, _) in run.results.items()}
        if run.failures or run.group_lost or self.members.deaths or not leftovers.may_be_open(begun, all_ranks):
            return
        reports = waiting.ask()
        if set(reports) == set(all_ranks):
            run.left_open = leftovers.find_open(reports)
            run.uneven = leftovers.describe_counters(reports)

    def replace(self, ranks: tuple[int, ...], timeout_s: float) -> tuple[str, ...]:
        """Replace the processes of some ranks by new ones; see :meth:`Repair.replace`.

        Raises:
            PoolStateError: Also: a run is in progress.
        """
        with self.alone():
            return self._repair.replace(ranks, timeout_s)

    def values(self, run: Run) -> RankResults[Any]:
        """Return the values that a finished run returned.

        Raises:
            WireError: A value cannot be read here.
        """
        values: dict[int, Any] = {}
        problem: Exception | None = None
        for rank, (result, frames) in sorted(run.results.items()):
            if result.payload is None:
                values[rank] = None
                continue
            try:
                values[rank] = unpack(result.payload, frames)
            except Exception as error:
                problem = problem or WireError(f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}")
            self._release(rank, result)
        if problem is not None:
            raise problem
        return RankResults(values)

    def _release(self, rank: int, result: Result) -> None:
        """Let a rank free the memory file of a result: now, or when the run that another thread has begun is over."""
        if result.payload is not None and any(not isinstance(item, bytes) for item in result.payload.buffers):
            self._to_release.append((rank, result.run_id))
            with contextlib.suppress(PoolStateError), self.alone():
                self._send_releases()

    def _send_releases(self) -> None:
        while self._to_release:
            rank, run_id = self._to_release.pop()
            self.members.send_control(rank, Release(run_id))

    @contextlib.contextmanager
    def _sigint_stops_the_run(self) -> Iterator[None]:
        """Let Ctrl-C stop the run. An interrupt before or after the wait for the run is noted in ``_sigint``."""

        def on_sigint() -> None:
            if self._waiting is None:
                self._sigint = True
            else:
                self.interrupt()

        self._sigint = False
        with caught_sigint(on_sigint):
            yield

    def diagnose(self) -> Diagnosis:
        """Return what holds up the present run; see :meth:`labkit.controller.pool.WorkerPool.diagnose`."""
        waiting = self._waiting
        if waiting is not None and (found := self._ask(waiting, 2.0)) is not None:
            return found
        dead = self.dead_ranks
        idle = {rank: RankReport(None) for rank in self.members.all_ranks}
        return judge((), range(self._world_size), (), (), dead, {}, idle, 0.0)

    def look(self) -> Diagnosis | None:
        """Return the last diagnosis of the present run; see :meth:`labkit.controller.pool.WorkerPool.look`."""
        waiting = self._waiting
        if waiting is None:
            return None
        # A run looks at its ranks once a second by itself. Looks in between would be too close to distinguish work from waiting.
        return waiting.watch.latest or self._ask(waiting, 1.0)

    @staticmethod
    def _ask(waiting: RunWait, limit_s: float) -> Diagnosis | None:
        request: Future[Diagnosis] = Future()
        waiting.watch.requests.put(request)
        with contextlib.suppress(TimeoutError):
            return request.result(limit_s)
        return None

    def interrupt(self) -> None:
        """Stop the present run, or hurry its stop. Safe from any thread."""
        waiting = self._waiting
        if waiting is not None:
            waiting.request_stop()
