"""Deaths beyond the table: native aborts, idle ranks, all ranks at once, a dead rank's leftovers, and exits that are not deaths."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit import PoolStateError, RankFailedError, WorkerDiedError, WorkerPool
from labkit.controller.start.deaths import LastWords
from labkit.errors import RankFailure
from labkit.wire.messages import StreamName
from tests.process.patience import DEATH_S, LOAD, lives, process, survivors, until

PREPARE = "import ctypes, os, signal, subprocess, sys, threading, time\nimport torch, torch.distributed as dist"


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        yield pool


@pytest.fixture
def pool(shared: WorkerPool) -> Iterator[WorkerPool]:
    """The pool with both ranks alive, before and after; the leak guard compares the two."""
    shared.run_cell(PREPARE)
    yield shared
    if shared.closed or shared.dead_ranks:
        shared.restart()


def died(pool: WorkerPool, cell: str) -> tuple[WorkerDiedError, RankFailure]:
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell(cell, timeout_s=60)
    return caught.value, next(failure for failure in caught.value.failures if failure.kind == "died")


# ---- how soon --------------------------------------------------------------------------------------------------------


def test_death_is_reported_in_half_a_second(pool: WorkerPool) -> None:
    took = []
    cell = (
        "if rank == 1:\n    os.write(1, str(time.monotonic()).encode())\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    )
    for _ in range(5):
        _, death = died(pool, cell)
        took.append(time.monotonic() - float(death.last_output))
        pool.restart()
        pool.run_cell(PREPARE)
    # The best of five, because the machine may be busy; each with the usual allowance.
    assert min(took) < 0.5
    assert max(took) < 0.5 * LOAD


def test_rank_that_native_code_never_gives_back_is_killed_at_the_line_that_called_it(pool: WorkerPool) -> None:
    # A mutex that its own thread locks twice: no signal ends the wait, and it is no collective.
    cell = "lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)\nlibc.pthread_mutex_lock(lock)\nif rank == 1:\n"
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell(cell + "    libc.pthread_mutex_lock(lock)\nelse:\n    dist.barrier()", timeout_s=1.0, cell_number=7)
    assert str(caught.value).count("rank 1 did not answer at Cell In[7], line 4 for 6 s and was killed; what it held is lost.") == 1
    assert caught.value.notes[0] == "The run did not finish in 1 s."
    assert "rank 0 waits in barrier" in caught.value.diagnosis
    assert "died" not in caught.value.diagnosis
    pool.restart(ranks=[1])
    assert pool.run_cell("int(rank == 0 and libc is not None)", want_value=True) == {0: 1, 1: 0}


# ---- idle ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT], ids=lambda s: s.name)
def test_death_of_an_idle_rank_is_known_at_once_and_named_by_the_next_run(pool: WorkerPool, number: signal.Signals) -> None:
    psutil.Process(pool.pids[1]).send_signal(number)
    until(lambda: pool.dead_ranks == (1,), "the pool knows of the death without a run", DEATH_S)
    assert "dead: 1" in repr(pool)
    with pytest.raises(PoolStateError, match=r"rank 1 is dead .*pool\.restart\(\)"):
        pool.run_cell("1")


@pytest.mark.parametrize("state", ["time.sleep(1000)", "while True: pass"])
def test_death_of_a_rank_outside_the_run_ends_the_run(pool: WorkerPool, state: str) -> None:
    victim = process(pool.pids[1])
    pool.push(victim=pool.pids[1])
    error, death = died_in_subset(pool, f"os.kill(victim, signal.SIGKILL)\n{state}")
    assert death.rank == 1
    assert error.interrupted_ranks == (0,)
    assert not lives(victim)


def died_in_subset(pool: WorkerPool, cell: str) -> tuple[WorkerDiedError, RankFailure]:
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell(cell, ranks=0, timeout_s=60)
    return caught.value, next(failure for failure in caught.value.failures if failure.kind == "died")


def test_rank_that_waits_for_an_idle_one_is_freed_by_its_death(pool: WorkerPool) -> None:
    pool.push(victim=pool.pids[1])
    cell = "threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()\ndist.barrier()"
    error, death = died_in_subset(pool, cell)
    assert death.rank == 1
    assert error.interrupted_ranks == (0,)


def test_death_is_not_lost_when_another_thread_asks_for_the_pools_state(pool: WorkerPool) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            repr(pool)
            with pytest.raises(PoolStateError):
                pool.run(lambda: 1)

    asking = threading.Thread(target=ask)
    cell = "if rank == 1:\n    time.sleep(0.5)\n    os._exit(3)\ndist.barrier()"
    started = threading.Event()
    pool.push(wait=0.5)
    threading.Timer(0.1, lambda: (asking.start(), started.set())).start()
    try:
        _, death = died(pool, cell)
        assert (death.rank, death.exitcode) == (1, 3)
    finally:
        started.wait(10)
        stop.set()
        asking.join(20)


# ---- native aborts ---------------------------------------------------------------------------------------------------


def test_gloo_shape_mismatch_that_aborts_a_rank_is_explained_by_its_last_output(pool: WorkerPool) -> None:
    error, death = died(pool, "dist.all_reduce(torch.ones(8 if rank == 1 else 4))")
    assert (death.exitcode, death.type_name) == (-signal.SIGABRT, "SIGABRT")
    assert "its last output says which" in death.message
    assert "Received data size doesn't match expected size" in death.last_output
    # The other rank may have finished, have the same error, or have been freed from waiting.
    other = 1 - death.rank
    assert [other in ranks for ranks in (error.failed_ranks, error.interrupted_ranks, error.finished)].count(True) == 1


def test_every_rank_dies(pool: WorkerPool) -> None:
    error, _ = died(pool, "os._exit(rank + 1)")
    assert {failure.rank: failure.exitcode for failure in error.failures} == {0: 1, 1: 2}
    assert pool.dead_ranks == (0, 1)
    with pytest.raises(PoolStateError, match="ranks 0-1 are dead"):
        pool.run_cell("1")


# ---- last words ------------------------------------------------------------------------------------------------------

WORDS = {
    "print": "print('last words', end='')",
    "stdout": "sys.stdout.write('last words')",
    "stderr": "sys.stderr.write('last words')",
    "os.write": "os.write(1, b'last words')",
    "child": "subprocess.run(['printf', 'last words'])",
    "thread": "t = threading.Thread(target=print, args=('last words',), kwargs={'end': ''}); t.start(); t.join()",
}


@pytest.mark.parametrize("way", WORDS)
def test_last_words_without_a_newline_are_kept(pool: WorkerPool, capfd: pytest.CaptureFixture[str], way: str) -> None:
    _, death = died(pool, f"if rank == 1:\n    {WORDS[way]}\n    os.kill(os.getpid(), signal.SIGKILL)")
    assert death.last_output == "last words"
    shown = capfd.readouterr()
    assert (shown.out + shown.err).count("[rank 1] last words\n") == 1


class SlowScreen:
    """A frontend that shows nothing until it is allowed to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.shown: list[str] = []

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        self.go_on.wait(60)
        self.shown.append(text)

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None: ...

    def clear(self, wait: bool) -> None: ...


def test_output_that_was_on_its_way_is_not_lost_with_the_rank(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rank writes until it has to wait, because nobody reads; then it is killed."""
    screen, exits = SlowScreen(), []
    unsent = LastWords.unsent
    monkeypatch.setattr(LastWords, "unsent", lambda self, rank, event: (exits.append(event), unsent(self, rank, event))[1])
    monkeypatch.setattr("labkit.controller.run.runner.present_screen", lambda places: screen)
    monkeypatch.setattr("labkit.controller.run.rank_output.LIMIT_CHARS", 10**9)
    victim, progress = process(pool.pids[1]), tmp_path / "lines"
    progress.write_text("0")
    stands: deque[str] = deque(maxlen=200)  # looks in two seconds

    def waits() -> bool:
        stands.append(progress.read_text())
        return stands[-1] > "0" and stands.count(stands[-1]) == stands.maxlen

    def kill_when_it_waits() -> None:
        until(waits, "the rank has to wait", 60)
        assert victim is not None
        victim.kill()
        until(lambda: not lives(victim), "the rank is dead")
        screen.go_on.set()

    killer = threading.Thread(target=kill_when_it_waits)
    killer.start()
    pool.push(progress=str(progress))
    cell = "if rank == 1:\n    lines = 0\n    while True:\n        print('x' * 65535)\n        lines += 1\n"
    _, death = died(pool, cell + "        with open(progress, 'w') as file: _ = file.write(str(lines))")
    killer.join()
    assert "lost" not in death.message
    rest = exits[0].stdout
    shown = "".join(screen.shown).removesuffix("" if rest.data.endswith(b"\n") else "\n")
    assert len(shown) == rest.position + len(rest.data) > 4_000_000
    assert set(shown) == {"x", "\n"}


def test_last_output_is_the_end_of_what_this_run_wrote(pool: WorkerPool) -> None:
    pool.run_cell("print('of an earlier run')")
    _, death = died(pool, "if rank == 1:\n    for i in range(500): print('line', i)\n    os._exit(2)")
    assert death.last_output.splitlines() == [f"line {number}" for number in range(480, 500)]
    pool.restart()
    pool.run_cell(PREPARE + "\nprint('of an earlier run')")
    _, death = died(pool, "os._exit(2)")
    assert death.last_output == ""


# ---- what a dead rank leaves behind ----------------------------------------------------------------------------------

CHILDREN = """
code = "import os, time; os.setsid(); print('up', flush=True); time.sleep(1000)"
children = [
    subprocess.Popen(["sleep", "1000"]),
    subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE),
    subprocess.Popen("(sleep 1000 & echo $!)", shell=True, stdout=subprocess.PIPE, start_new_session=True),
]
children[1].stdout.readline()
pids = [children[0].pid, children[1].pid, int(children[2].stdout.readline())]
"""


@pytest.mark.parametrize("end", ["death", "close"])
def test_children_of_a_rank_end_with_it_also_those_with_a_session_of_their_own(pool: WorkerPool, end: str) -> None:
    pool.run_cell(CHILDREN)
    found = {rank: [process(pid) for pid in pids] for rank, pids in pool.pull("pids").items()}
    assert all(len(survivors(children)) == 3 for children in found.values())
    if end == "close":
        pool.close()
        until(lambda: not survivors(found[0] + found[1]), "the children of both ranks ended", DEATH_S)
        return
    died(pool, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    until(lambda: not survivors(found[1]), "the children of the dead rank ended", DEATH_S)
    assert len(survivors(found[0])) == 3


# ---- what is no death ------------------------------------------------------------------------------------------------


def test_exception_in_a_thread_kills_no_rank_and_is_shown(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    before = pool.pids
    pool.run_cell("thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()")
    assert pool.pids == before
    assert pool.dead_ranks == ()
    error = capfd.readouterr().err
    for rank in range(2):
        assert f"[rank {rank}] ZeroDivisionError: division by zero" in error


def test_signal_that_the_cell_handles_kills_no_rank(pool: WorkerPool) -> None:
    pool.run_cell("got = []\nsignal.signal(signal.SIGTERM, lambda *_: got.append('TERM'))\nos.kill(os.getpid(), signal.SIGTERM)")
    assert pool.pull("got").same() == ["TERM"]


def test_case_12_interrupt_of_one_rank_from_outside_is_no_success(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError, match="rank 1") as caught:
        pool.run_cell("if rank == 1:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1000)", timeout_s=60)
    assert caught.value.finished == (0,)
    assert pool.run(lambda: 1).same() == 1


def test_child_that_dies_is_no_death_of_the_rank(pool: WorkerPool) -> None:
    command = [sys.executable, "-c", "import os; os.abort()"]
    pool.push(command=command)
    pool.run_cell("code = subprocess.run(command).returncode")
    assert pool.pull("code").same() == subprocess.run(command, check=False).returncode
