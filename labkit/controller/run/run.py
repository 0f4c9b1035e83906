"""One run: wait for the ranks, and stop those that do not end by themselves.

A run ends when each of its ranks has sent its one terminal message. Until then three things can go wrong, and each leads to the
same steps:

* a rank fails and the others may wait for it for ever: they get a grace period;
* the time limit passes;
* the user interrupts the run.

The steps are: raise KeyboardInterrupt on the ranks that still work, then abort their process groups, which frees them from native
collectives, then kill the ranks that still do not answer. A rank that is not killed keeps its variables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from labkit.base.limits import LIMITS
from labkit.controller.hang.diagnosis import Diagnosis
from labkit.controller.hang.watch import Watch
from labkit.errors import LeftOpen, RankFailure
from labkit.wire.messages import (
    Abort,
    Aborted,
    Failed,
    FromWorker,
    Inspection,
    Interrupt,
    Output,
    RankReport,
    Result,
    ToControl,
)

StopReason = Literal["failed", "timeout", "interrupted"]


class Ranks(Protocol):
    """The part of a pool that a run needs."""

    def receive(self, timeout_s: float) -> list[tuple[FromWorker, list[bytes]]]:
        """Wait for messages."""

    def send_control(self, rank: int, message: ToControl) -> None:
        """Send a message to a rank's control thread."""

    def kill(self, rank: int) -> None:
        """Kill a rank's process."""

    def wake(self) -> None:
        """Make receive() return. Called from a signal handler."""

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """All living ranks of the pool, in the run or not."""

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks whose process has ended."""


@dataclass
class Run:
    """A run in progress, and its outcome.

    Attributes:
        run_id: Its number.
        ranks: The ranks it runs on.
        results: Results with their frames, by rank.
        failures: Failures by rank.
        stopped: The reason why the run was stopped before all ranks had ended; None if it was not stopped.
        steps: The measures that labkit took, a sentence each.
        diagnosis: The cause that held it up when it was stopped.
        released: Ranks that had to be freed from native code.
        cut_off: Ranks whose error only says that another rank has left a collective.
        group_lost: Whether process groups were aborted, so that all ranks need new ones.
        left_open: Collectives that it left open although it ended well on all ranks.
        uneven: A sentence about ranks that have made different numbers of process groups; empty if the numbers are equal.
    """

    run_id: int
    ranks: tuple[int, ...]
    results: dict[int, tuple[Result, list[bytes]]] = field(default_factory=dict)
    failures: dict[int, RankFailure] = field(default_factory=dict)
    stopped: StopReason | None = None
    steps: list[str] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    released: tuple[int, ...] = ()
    cut_off: set[int] = field(default_factory=set)
    group_lost: bool = False
    left_open: tuple[LeftOpen, ...] = ()
    uneven: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def pending(self) -> list[int]:
        """Ranks that have not ended, in ascending order."""
        return [rank for rank in self.ranks if rank not in self.results and rank not in self.failures]

    def judged_failures(self) -> list[RankFailure]:
        """Return the failures in rank order. If there is another cause, ranks that were only cut off count as interrupted."""
        caused = self.stopped is not None or any(rank not in self.cut_off for rank in self.failures)
        return [
            replace(failure, kind="interrupted", traceback="") if caused and rank in self.cut_off else failure
            for rank, failure in sorted(self.failures.items())
        ]


class RunWait:
    """A wait for one run.

    Args:
        run: The run.
        pool: Its pool.
        timeout_s: Its time limit, or None.
        deaf_s: SIGINT is ignored for this many seconds from the run's start.
        on_output: Called with each Output.
        on_tick: Called a few times a second while waiting.
        on_hang: Called with the diagnosis when the run hangs.
    """

    def __init__(
        self,
        run: Run,
        pool: Ranks,
        timeout_s: float | None,
        on_output: Callable[[Output], None],
        on_tick: Callable[[], None] = lambda: None,
        on_hang: Callable[[Diagnosis], None] = lambda diagnosis: None,
        *,
        deaf_s: float = 0.0,
    ) -> None:
        self.run, self._pool = run, pool
        self._hears_from = run.started + deaf_s
        self._on_output, self._on_tick = on_output, on_tick
        self.watch = Watch(pool, run.ranks, lambda: (set(run.results), set(run.failures)), on_hang, timeout_s)
        self._limit = None if timeout_s is None else run.started + timeout_s
        self._grace_ends: float | None = None
        self._last_failure = 0.0
        self._stop_began: float | None = None
        self._next_signal = 0.0
        self._next_abort = 0.0
        self._sigints = 0
        self._aborted_at: float | None = None
        self._hurried = False
        self._killed: list[int] = []
        self._abort_answers: set[int] = set()

    def wait(self) -> Run:
        """Wait until every rank has ended."""
        while not self._step():
            pass
        return self.run

    def on_sigint(self) -> None:
        """Take the stop one step further. Called for each SIGINT."""
        if time.monotonic() >= self._hears_from:
            self.request_stop()

    def request_stop(self) -> None:
        """Stop the run, or take the stop one step further. Safe from signal handlers and other threads."""
        self._sigints += 1
        self._pool.wake()

    def _step(self) -> bool:
        for message, frames in self._pool.receive(self._patience()):
            self.take(message, frames)
        while self._sigints:
            self._sigints -= 1
            self._interrupt()
        if not self.run.pending and not self._waits():
            if self._stop_began is not None and self.run.diagnosis is None:
                self.run.diagnosis = self.watch.present()
            return True
        now = time.monotonic()
        if self._stop_began is not None:
            self._push_on(now)
        elif self._limit is not None and now >= self._limit:
            self._stop("timeout")
        elif self._grace_ends is not None and now >= self._grace_ends and self.run.pending:
            self._stop("failed")
        self.watch.tick(now - self.run.started)
        self._on_tick()
        return False

    def ask(self) -> dict[int, RankReport]:
        """Ask every living rank what it does, after the run has ended. Ranks that do not answer are left out."""
        self.watch.ask()
        while self.watch.is_open and not self._pool.dead_ranks:
            for message, frames in self._pool.receive(LIMITS.answer_s):
                self.take(message, frames)
            self.watch.tick(0.0)
        return self.watch.reports

    def take(self, message: FromWorker, frames: list[bytes]) -> None:
        """Process one message. Messages of earlier runs only carry late output."""
        if isinstance(message, Output):
            self._on_output(message)
        elif isinstance(message, Inspection):
            self.watch.take(message)
        elif isinstance(message, Aborted) and message.run_id == self.run.run_id:
            self._abort_answers.add(message.rank)
        elif isinstance(message, Result) and message.run_id == self.run.run_id:
            self.run.results[message.rank] = (message, frames)
        elif isinstance(message, Failed) and message.run_id == self.run.run_id:
            self.run.failures[message.rank] = message.failure
            self.run.results.pop(message.rank, None)  # a rank may die after it has finished
            self._last_failure = time.monotonic()
            self.run.group_lost |= message.group_lost
            if message.cut_off:
                self.run.cut_off.add(message.rank)
            if self._stop_began is None:
                # A dead rank will not finish, and other ranks will not repeat its error, so wait only briefly.
                patience = LIMITS.death_grace_s if message.failure.kind == "died" else LIMITS.grace_s
                ends = time.monotonic() + patience
                self._grace_ends = ends if self._grace_ends is None else min(ends, self._grace_ends)

    def _patience(self) -> float:
        moments = [time.monotonic() + 0.1]
        moments += [moment for moment in (self._limit, self._grace_ends) if moment is not None and self._stop_began is None]
        return max(0.0, min(moments) - time.monotonic())

    def _interrupt(self) -> None:
        if self._stop_began is None:
            self._stop("interrupted")
        else:
            # The second Ctrl-C means: stop now.
            self._stop_began = min(self._stop_began, time.monotonic() - LIMITS.abort_after_s)
            self._hurried = self._aborted_at is not None

    def _stop(self, reason: StopReason) -> None:
        self.run.stopped = reason
        self._stop_began = time.monotonic()
        # The control threads answer in order, so these answers show what held the ranks up before the interrupt.
        self.watch.look_last()
        self._push_on(self._stop_began)

    def _push_on(self, now: float) -> None:
        """Take the next step against the ranks that still work."""
        assert self._stop_began is not None
        waited = now - self._stop_began
        if now >= self._next_signal:
            self._next_signal = now + LIMITS.resend_s
            for rank in self.run.pending:
                self._pool.send_control(rank, Interrupt(self.run.run_id))
        if self.run.pending and (waited >= LIMITS.abort_after_s or self.watch.sees_waiting(self.run.pending)):
            self._abort()
        hurried = self._hurried and self._aborted_at is not None and now - self._aborted_at >= LIMITS.hurried_kill_after_s
        if waited >= LIMITS.kill_after_s or hurried:
            if self.run.diagnosis is None:
                self.run.diagnosis = self.watch.present()  # judge before the kill, so that it is not taken for the cause
            places = {state.rank: f" at {state.place}" for state in self.run.diagnosis.states if state.has_place}
            for rank in self.run.pending:
                if rank not in self._killed:
                    self._killed.append(rank)
                    place = places.get(rank, "")
                    self.run.steps.append(
                        f"rank {rank} did not answer{place} for {waited:.0f} s and was killed; what it held is lost."
                    )
                    self._pool.kill(rank)

    def _abort(self) -> None:
        if self._aborted_at is not None:
            # A rank may have been between two collectives when the first abort arrived.
            if time.monotonic() >= self._next_abort:
                self._next_abort = time.monotonic() + LIMITS.resend_s
                for rank in self.run.pending:
                    self._pool.send_control(rank, Abort(self.run.run_id))
            return
        self._aborted_at = time.monotonic()
        self._next_abort = time.monotonic() + LIMITS.resend_s
        self.run.group_lost = True
        self.run.released = tuple(self.run.pending)
        # Abort on every rank of the pool, also on those that have finished: a group must exist on all of its ranks or on none.
        for rank in self._pool.all_ranks:
            self._pool.send_control(rank, Abort(self.run.run_id))

    def _waits(self) -> bool:
        """Return whether the run has to wait although every rank has ended it."""
        return self._waits_for_aborts() or self._waits_for_cause() or self.watch.last_look_is_open

    def _waits_for_cause(self) -> bool:
        """Return whether all failures are those of victims, so that the death that cut them off may be reported soon."""
        only_victims = bool(self.run.failures) and not set(self.run.failures) - self.run.cut_off
        return only_victims and self._stop_began is None and time.monotonic() < self._last_failure + LIMITS.cause_s

    def _waits_for_aborts(self) -> bool:
        """Return whether an abort may still be running on ranks that had finished. Renewing their groups must not overtake it."""
        if self._aborted_at is None or self._stop_began is None:
            return False
        missing = set(self._pool.all_ranks) - self._abort_answers
        return bool(missing) and time.monotonic() < self._stop_began + LIMITS.kill_after_s
