"""Many requests to a rank that does not answer, many threads at one pool, many signals at one run: nothing is lost or broken."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from labkit import LabkitError, PoolStateError, WorkerPool
from labkit.wire.messages import Inspect
from tests.process.patience import LOAD, until


@pytest.fixture
def unharmed(pool: WorkerPool) -> Iterator[WorkerPool]:
    """The pool, whose ranks keep their variables and work together whatever happens to it."""
    pool.run_cell("import time, torch, torch.distributed as dist\nkept = rank * 3")
    before = pool.pids
    yield pool
    cell = "ones = torch.ones(1)\ndist.all_reduce(ones)\n(kept, float(ones))"
    results = pool.run_cell(cell, want_value=True, timeout_s=60)
    assert results is not None
    assert dict(results) == {rank: (rank * 3, 2.0) for rank in range(2)}
    assert pool.pids == before


def test_rank_that_listens_to_nobody_for_long_makes_no_run_fail(unharmed: WorkerPool) -> None:
    """Like native code that holds Python's lock for an hour while the rank is asked once a second what it does."""
    stopped = psutil.Process(unharmed.pids[1])
    stopped.suspend()
    try:
        began = time.monotonic()
        for number in range(5000):
            unharmed._life.runner.members.send_control(1, Inspect(10_000 + number))
        assert time.monotonic() - began < 2.0 * LOAD
    finally:
        stopped.resume()


def test_threads_that_share_a_pool_get_their_own_results_or_are_refused(unharmed: WorkerPool) -> None:
    """One run at a time; results with large buffers are released while other threads' runs are in progress."""
    wrong: list[object] = []
    done = [0] * 4

    def work(number: int) -> None:
        deadline = time.monotonic() + 60
        while done[number] < 25 and time.monotonic() < deadline:
            try:
                values = unharmed.run(lambda: torch.full((100_000,), float(number)))
            except PoolStateError:
                time.sleep(0.001)
                continue
            if not all(bool((value == number).all()) for value in values.values()):
                wrong.append(values)
            done[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert done == [25] * 4


@pytest.mark.parametrize("cell", ["if rank == 0: dist.barrier()", "time.sleep(0.05)", "1 / 0"], ids=["hang", "short", "error"])
def test_hail_of_interrupts_breaks_nothing(unharmed: WorkerPool, cell: str) -> None:
    """A user holds Ctrl-C down. Each signal stops the run, or comes when everything is in order again."""
    over = threading.Event()

    def hail() -> None:
        while not over.wait(0.002):
            os.kill(os.getpid(), signal.SIGINT)

    hailing = threading.Thread(target=hail)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        hailing.start()
        for _ in range(5):
            try:
                unharmed.run_cell(cell, timeout_s=20)
            except (KeyboardInterrupt, LabkitError):
                continue
    except KeyboardInterrupt:
        pass  # between two runs it interrupts this test itself
    finally:
        while hailing.is_alive():
            try:
                over.set()
                hailing.join()
            except KeyboardInterrupt:
                continue
        signal.signal(signal.SIGINT, previous)
    until(lambda: unharmed.diagnose().kind == "idle", "no run is in progress")
