"""Stopping a correct program blames no rank; stopping an incorrect one that hangs names the rank at fault."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from labkit import RunInterrupted, WorkerPool
from labkit.base.limits import other_limits
from labkit.errors import RunReport
from tests.process.interrupts import ARRIVES_WITHIN_S
from tests.process.stop_scenarios import PREPARE, RIGHT, WRONG

COUNTS = pytest.mark.parametrize("count", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
HALF_COUNTS = pytest.mark.parametrize("count", [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """A pool that looks at its ranks early, so that stops fall before and after a second look.

    Each test has its own: a process can rebuild its groups 224 times.
    """
    with other_limits(first_look_s=0.3, look_every_s=0.3), WorkerPool(4, device="cpu") as pool:
        pool.run_cell(PREPARE, timeout_s=60)
        yield pool


def stopped(pool: WorkerPool, cell: str, ready: Callable[[], bool], after_s: float) -> RunReport:
    """Run a cell, and stop it some time after it is ready, unless it ends before."""
    over = threading.Event()

    def stop() -> None:
        deadline = time.monotonic() + ARRIVES_WITHIN_S
        while not over.is_set() and not ready() and time.monotonic() < deadline:
            over.wait(0.1)  # each question costs the ranks processor time, which would look like work
        if not over.wait(after_s):
            pool.interrupt()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(RunReport) as caught:
            pool.run_cell(cell, cell_number=1)
    finally:
        over.set()
        thread.join()
    return caught.value


def lives_on(pool: WorkerPool) -> bool:
    """Return whether every rank kept its variables and works with the others, in the default group and in others."""
    cell = (
        "ones = torch.ones(1)\nfor group in (None, halves[rank // 2]):\n    dist.all_reduce(ones, group=group)\n(kept, float(ones))"
    )
    results = pool.run_cell(cell, want_value=True, timeout_s=60)
    return results is not None and dict(results) == {rank: (rank * 10, 8.0) for rank in range(4)}


@COUNTS
def test_p1_stopping_a_right_program_blames_no_rank(pool: WorkerPool, count: int) -> None:
    moments = random.Random(7)
    for number in range(count):
        name = list(RIGHT)[number % len(RIGHT)]
        error = stopped(pool, RIGHT[name], lambda: pool.look() is not None, moments.uniform(0.0, 1.2))
        assert isinstance(error, RunInterrupted), name
        assert error.failed_ranks == (), name
        assert re.match(r"$|It was stopped while running: |ranks 0-3 are all in ", error.diagnosis), (name, error.diagnosis)
        assert lives_on(pool), name


@HALF_COUNTS
def test_p1_stopping_a_wrong_program_that_hangs_names_the_rank_that_is_wrong(pool: WorkerPool, count: int) -> None:
    moments = random.Random(7)
    for number in range(count):
        name = list(WRONG)[number % len(WRONG)]
        cell, verdict = WRONG[name]
        error = stopped(pool, cell, lambda: pool.diagnose().hangs, moments.uniform(0.0, 0.5))
        assert re.search(verdict, error.diagnosis), (name, error.diagnosis)
        assert lives_on(pool), name
