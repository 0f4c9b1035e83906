"""A death is the cause and the ranks that it cut off are victims, in whatever order the news of them arrives."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.base.limits import LIMITS
from labkit.controller.run import run as module
from labkit.controller.run.run import Run, RunWait
from labkit.controller.start.deaths import LastWords
from labkit.controller.start.launchers.launcher import WorkerExit
from labkit.errors import RankFailure
from labkit.wire.messages import Failed, FromWorker, Output, Result, Stream, ToControl
from labkit.wire.pipes import KEPT_BYTES, Kept, Rest, make_pipes, take_rest

VICTIM = Failed(0, 1, RankFailure(0, "exception", "RuntimeError", "Connection closed by peer"), group_lost=True, cut_off=True)
OWN_ERROR = Failed(0, 1, RankFailure(0, "exception", "ValueError", "boom"))
DEATH = Failed(1, 1, RankFailure(1, "died", "SIGKILL", "killed from outside", exitcode=-9), group_lost=True)


class Script:
    """A pool whose messages come in the given batches, one batch per request."""

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
    """A clock that the test controls."""
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
    assert now[0] - 100.0 < LIMITS.cause_s + 0.5


def test_error_of_the_ranks_own_waits_for_nothing(now: list[float]) -> None:
    pool = Script(now, [OWN_ERROR])
    assert ended(pool, (0,)).failures[0].message == "boom"
    assert pool.asked == 1


def test_rank_that_dies_after_it_has_finished_has_not_finished(now: list[float]) -> None:
    run = ended(Script(now, [Result(1, 1, None)], [DEATH], [Result(0, 1, None)]), (0, 1))
    assert set(run.results) == {0}
    assert set(run.failures) == {1}


# ---- last words ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3 * KEPT_BYTES // 2), max_size=8))
def test_the_last_bytes_that_were_read_are_kept(sizes: list[int]) -> None:
    kept, written = Kept(), b""
    for number, size in enumerate(sizes):
        data = bytes([number + 1]) * size
        kept.keep(0, data)
        written += data
    assert kept.last(0) == (len(written), written[-KEPT_BYTES:])
    assert kept.last(1) == (0, b"")
    kept.close()


def test_both_processes_see_the_same_copy() -> None:
    kept = Kept()
    pid = os.fork()
    if pid == 0:
        kept.keep(1, b"from the child")
        os._exit(0)
    os.waitpid(pid, 0)
    assert kept.last(1) == (14, b"from the child")
    kept.close()


def test_rest_is_what_was_kept_and_what_nobody_has_read() -> None:
    read_fds, write_fds = make_pipes()
    kept = Kept()
    kept.keep(0, b"read, ")
    os.write(write_fds[0], b"not read")
    os.write(write_fds[1], b"error")
    assert take_rest(read_fds, kept) == (Rest(0, b"read, not read"), Rest(0, b"error"))
    for fd in write_fds:
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.read(read_fds[0], 1)


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [(0, (10, "abcdef")), (10, (0, "abcdef")), (13, (0, "def")), (16, (0, "")), (20, (0, ""))],
)
def test_rest_after_a_position_is_what_has_not_arrived(arrived: int, expected: tuple[int, str]) -> None:
    assert Rest(10, b"abcdef").after(arrived) == expected


def test_what_a_dead_rank_had_not_sent_is_told_once_and_what_is_lost_is_counted() -> None:
    words = LastWords()
    words.hear(Output(0, 1, (Stream("stdout", "sent ", position=5),)))
    event = WorkerExit(123, -9, Rest(0, b"sent and not"), Rest(1000, b"late"))
    unsent, lost = words.unsent(0, event)
    assert [(item.name, item.text) for item in unsent] == [("stdout", "and not"), ("stderr", "late")]
    assert lost == 1000
    words.hear(Output(0, 1, unsent))
    assert words.of(0) == "sent and notlate"
    assert words.unsent(0, event) == ((), 0)


def test_words_of_the_process_before_are_not_those_of_the_new_one() -> None:
    words = LastWords()
    words.hear(Output(0, 1, (Stream("stdout", "old", position=3),)))
    words.forget(0)
    assert words.of(0) == ""
    unsent, lost = words.unsent(0, WorkerExit(5, 1, Rest(0, b"new")))
    assert ([item.text for item in unsent], lost) == (["new"], 0)
