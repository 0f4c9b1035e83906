"""A death is the cause and the ranks that it cut off are victims, in whatever order the two are heard of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from labkit.controller import run as module
from labkit.controller.run import Run, RunWait
from labkit.errors import RankFailure
from labkit.wire.messages import Failed, FromWorker, Result, ToControl

VICTIM = Failed(0, 1, RankFailure(0, "exception", "RuntimeError", "Connection closed by peer"), group_lost=True, cut_off=True)
OWN_ERROR = Failed(0, 1, RankFailure(0, "exception", "ValueError", "boom"))
DEATH = Failed(1, 1, RankFailure(1, "died", "SIGKILL", "killed from outside", exitcode=-9), group_lost=True)


class Script:
    """A pool whose messages come in the given batches, one batch for each time that somebody asks."""

    all_ranks = (0, 1)
    dead_ranks = ()

    def __init__(self, now: list[float], *batches: list[FromWorker]) -> None:
        self._now, self._batches = now, iter(batches)
        self.asked = 0

    def receive(self, timeout_s: float) -> list[tuple[FromWorker, list[bytes]]]:
        self.asked += 1
        self._now[0] += timeout_s
        return [(message, []) for message in next(self._batches, [])]

    def send_control(self, rank: int, message: ToControl) -> None: ...

    def kill(self, rank: int) -> None:
        raise AssertionError("nobody is to be killed")

    def wake(self) -> None: ...


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock, in the hand of the test."""
    clock = [100.0]
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0] + 1e-6 * next(ticks))
    return clock


def ended(pool: Script, ranks: tuple[int, ...]) -> Run:
    return RunWait(Run(1, ranks), pool, None, lambda output: None).wait()


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["outside the run", "in the run"])
@pytest.mark.parametrize("later", [0, 3], ids=["at once", "a moment later"])
def test_rank_that_was_cut_off_is_a_victim_of_the_death_that_follows(now: list[float], ranks: tuple[int, ...], later: int) -> None:
    run = ended(Script(now, [VICTIM], *[[]] * later, [DEATH]), ranks)
    assert [(failure.rank, failure.kind) for failure in run.judged_failures()] == [(0, "interrupted"), (1, "died")]


def test_rank_that_was_cut_off_without_a_death_is_reported_in_the_end(now: list[float]) -> None:
    run = ended(Script(now, [VICTIM]), (0,))
    assert [(failure.rank, failure.kind) for failure in run.judged_failures()] == [(0, "exception")]
    assert now[0] - 100.0 < module.CAUSE_S + 0.5


def test_error_of_the_ranks_own_waits_for_nothing(now: list[float]) -> None:
    pool = Script(now, [OWN_ERROR])
    assert ended(pool, (0,)).failures[0].message == "boom"
    assert pool.asked == 1


def test_rank_that_dies_after_it_has_finished_has_not_finished(now: list[float]) -> None:
    run = ended(Script(now, [Result(1, 1, None)], [DEATH], [Result(0, 1, None)]), (0, 1))
    assert set(run.results) == {0}
    assert set(run.failures) == {1}
