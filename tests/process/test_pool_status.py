"""The status of a pool shows idle, working, waiting and dead ranks, and looking does not disturb them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labkit import WorkerPool
from labkit.notebook.views.pool_status import RankStatus, rank_statuses, status_html, status_text
from tests.process.notebook import run_cells

WAIT_S = 20.0


@pytest.fixture
def running() -> Iterator[Callable[[WorkerPool, str], None]]:
    """Run a cell in a thread, as a notebook's main thread would; it is interrupted when the test ends."""
    threads: list[tuple[WorkerPool, threading.Thread]] = []

    def start(pool: WorkerPool, source: str) -> None:
        def run() -> None:
            try:
                pool.run_cell(source, cell_number=7)
            except BaseException:
                return  # it is interrupted on purpose

        threads.append((pool, threading.Thread(target=run)))
        threads[-1][1].start()

    yield start
    for pool, thread in threads:
        while thread.is_alive():
            pool.interrupt()
            thread.join(0.2)


def _until(look: Callable[[], list[RankStatus]], wanted: Callable[[list[RankStatus]], bool]) -> list[RankStatus]:
    deadline = time.monotonic() + WAIT_S
    while not wanted(statuses := look()):
        assert time.monotonic() < deadline, statuses
    return statuses


def test_between_runs_every_rank_idles_with_its_process_and_memory(pool: WorkerPool) -> None:
    statuses = rank_statuses(pool)
    assert [(status.rank, status.pid, status.device, status.state) for status in statuses] == [
        (rank, pool.pids[rank], "cpu", "idle") for rank in (0, 1)
    ]
    assert all(status.memory_bytes and status.runs == "" and status.for_s is None for status in statuses)


def test_memory_counts_what_a_rank_has_taken_for_itself(pool: WorkerPool) -> None:
    before = rank_statuses(pool)
    pool.run_cell("taken = bytearray(b'x' * (200 << 20)) if rank == 1 else None")
    after = rank_statuses(pool)
    pool.run_cell("del taken")
    grown = [(b.memory_bytes or 0) - (a.memory_bytes or 0) for a, b in zip(before, after, strict=True)]
    assert grown[1] > 190 << 20
    assert grown[0] < 50 << 20


def test_a_run_shows_who_works_who_waits_where_and_for_how_long(
    pool: WorkerPool, running: Callable[[WorkerPool, str], None]
) -> None:
    running(pool, "import torch.distributed as dist\nif rank == 0:\n    while True:\n        sum(range(1000))\ndist.barrier()")
    statuses = _until(lambda: rank_statuses(pool), lambda found: [status.state for status in found] == ["working", "waiting"])
    assert statuses[0].runs.startswith("Cell In[7], line ")
    assert re.fullmatch(r"Cell In\[7\], line 5: barrier #\d+", statuses[1].runs)
    assert all(status.for_s is not None and status.for_s < WAIT_S for status in statuses)
    assert "waiting" in status_text(pool, statuses)


def test_a_rank_that_says_how_far_it_is_is_quoted(pool: WorkerPool, running: Callable[[WorkerPool, str], None]) -> None:
    source = "import time\nfrom labkit.base.progress import task\nwith task('save step 3', 3 << 20) as writing:\n"
    running(pool, source + "    writing.advance((1 + rank) << 20)\n    time.sleep(1000)")
    statuses = _until(lambda: rank_statuses(pool), lambda found: all("%" in status.runs for status in found))
    assert [status.runs for status in statuses] == [f"Cell In[7], line 5: save step 3 {share} %" for share in (33, 66)]


def test_looking_never_keeps_a_run_from_starting(pool: WorkerPool) -> None:
    end = threading.Event()

    def look() -> None:
        while not end.is_set():
            rank_statuses(pool)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for number in range(100):
            assert pool.run(abs, -number).same() == number
    finally:
        end.set()
        for looker in lookers:
            looker.join()


def test_a_dead_rank_is_called_dead() -> None:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        os.kill(pool.pids[1], signal.SIGKILL)
        statuses = _until(lambda: rank_statuses(pool), lambda found: found[1].state == "dead")
        assert statuses[0].state == "idle"
        assert statuses[1].memory_bytes is None
        html = status_html(pool, statuses)
        assert "✕ dead" in html
        assert 'scope="row"' in html


CELLS = {
    "load": "%load_ext labkit\nimport labkit, threading, time\npool = labkit.WorkerPool(2, device='cpu')",
    "repr": "pool",
    "status": "%pool",
    "follow": "%pool follow",
    "work": "%%spmd\nimport time\ntime.sleep(2.5)",
    "threads": "[thread.name for thread in threading.enumerate() if thread.name == 'labkit-follow']",
    "close": "pool.close()",
    "closed": "pool",
    "threads after": (
        "deadline = time.monotonic() + 10\n"
        "while (left := [t.name for t in threading.enumerate() if t.name == 'labkit-follow']) "
        "and time.monotonic() < deadline: pass\n"
        "left"
    ),
}


def test_in_a_notebook_the_status_is_a_table_without_a_dead_widget(tmp_path: Path) -> None:
    cells = run_cells(CELLS, tmp_path)
    assert [name for name, cell in cells.items() if cell.error] == []
    assert cells["repr"].displays[0]["text/plain"] == "WorkerPool(world_size=2, device='cpu'): 2 ranks, CPU processes, gloo"
    assert "<table>" in cells["repr"].displays[0]["text/html"]
    for name in ("status", "follow"):
        table, buttons = cells[name].displays
        assert table["text/plain"].splitlines()[1].split() == ["rank", "process", "device", "state", "own", "memory"]
        assert "<table>" in table["text/html"]
        assert buttons == {"text/plain": "", "text/html": ""}
    assert cells["threads"].text == "['labkit-follow']"
    assert cells["threads after"].text == "[]"
    assert cells["closed"].text.endswith("closed")
