"""Repeated looks at the ranks while a run waits, to notice when waiting longer cannot help."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol

from labkit.base.limits import LIMITS
from labkit.controller.hang.diagnosis import Diagnosis
from labkit.controller.hang.verdict import APART_S, judge
from labkit.wire.messages import Inspect, Inspection, RankReport, ToControl


class Watched(Protocol):
    """The part of a pool that the watch needs."""

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """All living ranks."""

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks whose process has ended."""

    def send_control(self, rank: int, message: ToControl) -> None:
        """Send a message to a rank's control thread."""


class Watch:
    """Gathers reports of one run and judges them.

    Args:
        pool: The pool whose ranks it asks.
        ranks: The ranks of the run.
        ended: Returns the ranks that have ended the run, and those of them that failed.
        on_hang: Called once for each hang that is found.
        limit_s: The run's time limit. When it passes, there has to be an earlier look to compare with.
    """

    def __init__(
        self,
        pool: Watched,
        ranks: tuple[int, ...],
        ended: Callable[[], tuple[set[int], set[int]]],
        on_hang: Callable[[Diagnosis], None],
        limit_s: float | None = None,
    ) -> None:
        self._pool, self._ranks, self._ended, self._on_hang = pool, ranks, ended, on_hang
        self._number = 0
        self._asked_at = 0.0
        self._open = False
        self._earlier: deque[tuple[float, dict[int, RankReport]]] = deque()
        self._before: dict[int, RankReport] = {}
        self._before_at = 0.0
        self._reports: dict[int, RankReport] = {}
        self._next_look = LIMITS.first_look_s
        if limit_s is not None:
            self._next_look = min(self._next_look, max(0.0, limit_s - APART_S - LIMITS.early_look_s))
        self._suspected = self._shown = ""
        self._ended_then: tuple[set[int], set[int]] = (set(), set())
        self.latest: Diagnosis | None = None
        self.requests: queue.SimpleQueue[Future[Diagnosis]] = queue.SimpleQueue()
        self._waiting: list[Future[Diagnosis]] = []
        self._last = False

    def look_last(self) -> None:
        """Ask once more, for the report of a run that is being stopped. After that, labkit determines what the ranks do."""
        self.ask()
        self._last = True

    @property
    def is_open(self) -> bool:
        """True if answers to a look may still come."""
        return self._open

    @property
    def reports(self) -> dict[int, RankReport]:
        """The answers to the last look so far."""
        return dict(self._reports)

    @property
    def last_look_is_open(self) -> bool:
        """True if answers to the last look of a stopped run may still come; they have at most ``answer_s``."""
        return self._last and self._open

    def tick(self, waited_s: float) -> None:
        """Proceed with the watch. Call this a few times a second with the seconds that the run has lasted."""
        if self._open and time.monotonic() - self._asked_at >= LIMITS.answer_s:
            self._conclude()
        if self._open or self._last:
            return
        while not self.requests.empty():
            self._waiting.append(self.requests.get())
        if self._waiting or waited_s >= self._next_look:
            self._next_look = waited_s + LIMITS.look_every_s
            self.ask()

    def ask(self) -> None:
        """Ask every living rank what it does."""
        if self._reports:
            self._earlier.append((self._asked_at, self._reports))
        self._reports = {}
        self._number += 1
        self._asked_at = time.monotonic()
        # Compare with each rank's last answer that is far enough back; a rank may have missed the look before this one.
        while self._earlier and self._earlier[0][0] <= self._asked_at - APART_S:
            self._before_at, reports = self._earlier.popleft()
            self._before |= reports
        self._ended_then = tuple(map(set, self._ended()))  # type: ignore[assignment]
        self._open = True
        for rank in self._pool.all_ranks:
            self._pool.send_control(rank, Inspect(self._number))

    def take(self, message: Inspection) -> None:
        """Take a rank's answer."""
        if message.request_id != self._number:
            return
        self._reports[message.rank] = message.report
        if self._open and set(self._reports) >= set(self._pool.all_ranks):
            self._conclude()

    def sees_waiting(self, ranks: Iterable[int]) -> bool:
        """Return whether one of these ranks has just reported that it waits in a collective."""
        return any(rank in self._reports and self._reports[rank].in_collective for rank in ranks)

    def present(self) -> Diagnosis:
        """Judge the run by the present reports."""
        finished, failed = self._ended_then
        apart_s = self._asked_at - self._before_at if self._before else 0.0
        return judge(self._ranks, self._all(), finished, failed, self._pool.dead_ranks, self._before, self._reports, apart_s)

    def _all(self) -> tuple[int, ...]:
        return tuple(sorted({*self._pool.all_ranks, *self._pool.dead_ranks}))

    def _conclude(self) -> None:
        self._open = False
        self.latest = diagnosis = self.present()
        for waiting in self._waiting:
            waiting.set_result(diagnosis)
        self._waiting.clear()
        hang = diagnosis.verdict if diagnosis.hangs else ""
        if hang and hang == self._suspected and hang != self._shown:
            self._shown = hang
            self._on_hang(diagnosis)
        self._suspected = hang  # other ranks may still arrive, so a hang is shown only when the next look confirms it
