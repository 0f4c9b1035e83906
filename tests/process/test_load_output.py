"""Output under load is complete, or cut with a correct count; the kernel's memory stays small and the other ranks continue."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit import WorkerPool
from labkit.controller.run import rank_output as output
from labkit.controller.start.launchers import fork_server
from labkit.wire.messages import StreamName
from tests.process.patience import LOAD, until

MIB = 2**20


class Screen:
    """A screen that keeps a cell's output; it can be blocked, like a frontend that does not read."""

    def __init__(self) -> None:
        self.texts: list[tuple[int | None, StreamName, str]] = []
        self.displays: list[dict[str, Any]] = []
        self.open = threading.Event()
        self.open.set()

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        self.open.wait(60)
        self.texts.append((rank, name, text))

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        self.open.wait(60)
        self.displays.append(data)

    def clear(self, wait: bool, rank: int | None = None) -> None: ...

    def lines(self, rank: int, name: StreamName = "stdout") -> list[str]:
        return "".join(text for owner, stream, text in self.texts if (owner, stream) == (rank, name)).split("\n")[:-1]

    def not_shown(self, rank: int) -> int:
        """The number of characters that the output reports as left out."""
        told = r"\.\.\. ([\d,]+) of [\d,]+ characters of output are left out here \.\.\."
        found = [re.fullmatch(told, line) for line in self.lines(rank, "stderr")]
        return sum(int(match[1].replace(",", "")) for match in found if match)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr("labkit.controller.run.runner.present_screen", lambda places: screen)
    return screen


@contextmanager
def memory_grows_by_at_most(limit: int) -> Iterator[None]:
    """This process's memory, sampled continuously."""
    me, over = psutil.Process(), threading.Event()
    before = me.memory_info().rss
    peak = [before]

    def look() -> None:
        while not over.wait(0.02):
            peak[0] = max(peak[0], me.memory_info().rss)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
    assert peak[0] - before < limit, f"the kernel's memory grew by {(peak[0] - before) / MIB:.0f} MiB"


# ---- floods ----------------------------------------------------------------------------------------------------------


def test_p15_hundred_megabytes_are_cut_with_an_honest_count_and_the_other_rank_goes_on(
    pool: WorkerPool, screen: Screen, tmp_path: Path
) -> None:
    """Rank 0 writes; rank 1 checks that it has finished computing long before rank 0 ends."""
    pool.push(done=str(tmp_path / "done"))
    cell = """
import pathlib, sys
if rank == 0:
    for number in range(100):
        _ = sys.stdout.write(("x" * 99_999 + "\\n") * 10)
        if number == 50:
            finished_before = pathlib.Path(done).exists()
else:
    print("short")
    pathlib.Path(done).touch()
"""
    with memory_grows_by_at_most(100 * MIB):
        pool.run_cell(cell, timeout_s=100)
    assert pool.pull("finished_before", ranks=0)[0] is True
    shown = screen.lines(0)
    num_chars = sum(map(len, shown)) + len(shown)
    assert num_chars == output.LIMIT_CHARS  # which falls on the end of a line here
    assert num_chars + screen.not_shown(0) == 100_000_000
    assert screen.lines(1) == ["short"]
    assert screen.not_shown(1) == 0


def test_p15_ten_megabytes_without_a_newline_are_cut_with_an_honest_count(pool: WorkerPool, screen: Screen) -> None:
    cell = "import sys\nfor number in range(100):\n    _ = sys.stdout.write(str(number % 10) * 100_000)\nprint()\nprint('after')"
    with memory_grows_by_at_most(100 * MIB):
        pool.run_cell(cell, ranks=1, timeout_s=60)
    *_, line, after = screen.lines(1)
    assert after == "after"
    whole = "".join(str(number % 10) * 100_000 for number in range(100))
    assert line.startswith(whole[:400_000])
    assert line.endswith(whole[-400_000:])
    assert len(line) + 1 + len("after\n") + screen.not_shown(1) == 10_000_000 + 1 + len("after\n")
    # While it grows only its end is shown: displaying the whole line at every update would be a flood of its own.
    assert all(len(data["text/plain"]) < 3 * output.LIVE_CHARS for data in screen.displays)


def test_unfinished_line_is_shown_while_it_grows(pool: WorkerPool, screen: Screen, tmp_path: Path) -> None:
    go = tmp_path / "go"
    pool.push(go=str(go))

    def release() -> None:
        until(lambda: any("12" in data["text/plain"] for data in screen.displays), "the unfinished line is shown")
        go.touch()

    watching = threading.Thread(target=release)
    watching.start()
    pool.run_cell(
        "import os, time\nprint(1, end='')\nprint(2, end='')\nwhile not os.path.exists(go): time.sleep(0.01)", timeout_s=60
    )
    watching.join()
    assert screen.lines(0) == screen.lines(1) == ["12"]


def test_bytes_that_are_no_text_arrive_all(pool: WorkerPool, screen: Screen) -> None:
    data = bytes(byte for byte in random.Random(1).randbytes(200_000) if byte not in b"\r\n")
    pool.push(data=data)
    pool.run_cell("import os\ni = 0\nwhile i < len(data):\n    i += os.write(1, data[i : i + 7919])", ranks=0, timeout_s=60)
    assert screen.lines(0) == [data.decode("utf-8", "replace")]
    assert screen.not_shown(0) == 0


def test_flood_of_short_lines_arrives_all_and_in_order(pool: WorkerPool, screen: Screen) -> None:
    pool.run_cell("for number in range(100_000): print(number)", timeout_s=100)
    for rank in range(2):
        assert screen.lines(rank) == [str(number) for number in range(100_000)]


# ---- many writers ----------------------------------------------------------------------------------------------------

THREADS = """
import threading
def talk(number):
    for line in range(200):
        print(f"thread {number} line {line}")
threads = [threading.Thread(target=talk, args=(number,)) for number in range(10)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_lines_of_ten_threads_arrive_whole_each_once_and_in_their_order(pool: WorkerPool, screen: Screen) -> None:
    pool.run_cell(THREADS, timeout_s=60)
    for rank in range(2):
        lines = screen.lines(rank)
        assert Counter(lines) == Counter(f"thread {number} line {line}" for number in range(10) for line in range(200))
        for number in range(10):
            assert [line for line in lines if line.startswith(f"thread {number} ")] == [
                f"thread {number} line {line}" for line in range(200)
            ]


def test_thread_that_leaves_its_line_unfinished_keeps_the_others_waiting_only_once(pool: WorkerPool, screen: Screen) -> None:
    cell = """
import threading, time
begun = threading.Event()
def begin():
    print("begun ", end="")
    begun.set()
    go_on.wait(30)
go_on = threading.Event()
thread = threading.Thread(target=begin)
thread.start()
_ = begun.wait(30)
start = time.monotonic()
for number in range(300):
    print(number)
took = time.monotonic() - start
go_on.set()
thread.join()
"""
    pool.run_cell(cell, ranks=0, timeout_s=60)
    assert screen.lines(0) == ["begun 0", *map(str, range(1, 300))]
    assert pool.pull("took", ranks=0)[0] < 0.5 * LOAD


# ---- a front end that does not read ----------------------------------------------------------------------------------


def test_front_end_that_does_not_read_loses_nothing_and_holds_up_only_who_writes(
    pool: WorkerPool, screen: Screen, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    pool.push(done=str(done))
    screen.open.clear()
    waited: list[bool] = []

    def let_read() -> None:
        until(done.exists, "the rank that writes nothing has ended")
        waited.append(not screen.texts)
        screen.open.set()

    reading = threading.Thread(target=let_read)
    reading.start()
    cell = "import pathlib\nif rank == 0:\n    for i in range(9000): print(f'{i:099}')\nelse:\n    pathlib.Path(done).touch()"
    with memory_grows_by_at_most(60 * MIB):
        pool.run_cell(cell, timeout_s=100)
    reading.join()
    assert waited == [True]
    assert screen.lines(0) == [f"{number:099}" for number in range(9000)]


def test_rank_that_waits_in_its_print_can_be_interrupted(pool: WorkerPool, screen: Screen, tmp_path: Path) -> None:
    screen.open.clear()
    mark = tmp_path / "mark"
    pool.push(mark=str(mark))

    def stop() -> None:
        until(mark.exists, "the rank writes")
        pool.interrupt()
        screen.open.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pool.run_cell("import pathlib\nwhile True:\n    print('x' * 10000)\n    pathlib.Path(mark).touch()", timeout_s=100)
    stopping.join()
    assert time.monotonic() - began < 5.0 * LOAD
    assert pool.run(lambda: 1).same() == 1


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not fork_server.available(), reason="there is no fork server on this system")
def test_figures_are_shown_by_ranks_that_were_forked_after_a_pause(screen: Screen) -> None:
    """The fork server uses a pause to import matplotlib, and its choice of a backend must not be the ranks'."""

    def imported() -> bool:
        with WorkerPool(1, "cpu", replace=True) as pool:
            results = pool.run_cell("import sys\n'matplotlib' in sys.modules", want_value=True)
            if results is None or not results[0]:
                return False
            screen.displays.clear()
            pool.run_cell("import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\nplt.show()")
        return True

    patient: Callable[[], bool] = lambda: imported() or bool(time.sleep(0.2))  # noqa: E731
    until(patient, "the fork server has imported matplotlib", 60)
    assert [data for data in screen.displays if "image/png" in data]
