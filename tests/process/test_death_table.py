"""A rank dies in every way and in every state: the run reports it at once, and the pool can be restarted.

The rank that dies watches itself from a thread and ends when its main thread has reached the wanted state.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import PoolStateError, WorkerDiedError, WorkerPool
from labkit.errors import RankFailure
from tests.matrix import matrix
from tests.process.patience import DEATH_S, lives, process

VICTIM = 1

# On the victim: `watch(state)` lets it die once its main thread is in that state.
PREPARE = """
import ctypes, os, pathlib, signal, sys, threading, time
import torch, torch.distributed as dist

main = threading.main_thread()
others = dist.new_group()

def compute():
    while True:
        pass

def nap():
    time.sleep(1000)

def has_reached(state):
    frame = sys._current_frames()[main.ident]
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    status = pathlib.Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[0]
    return state in names and (state == "compute" or status == "S")

def last_words():
    pathlib.Path(stamp).write_text(str(time.monotonic()))
    os.write(1, f"rank {rank} says goodbye".encode())

def watch(state):
    def wait():
        while not has_reached(state):
            time.sleep(0.002)
        last_words()
        die()
    threading.Thread(target=wait, daemon=True).start()
"""
WAYS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "ctypes.string_at(0)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "exit": "os._exit(17)",
}
STATES = {"Python": "compute()", "sleep": "nap()", "a collective": "dist.barrier()"}
NAMES = {"Python": "compute", "sleep": "nap", "a collective": "barrier"}
# In a group of their own, because a barrier that the victim had joined would end.
OTHERS = {"in a collective": "dist.barrier(others)", "finished": "pass"}
ROWS = [(2, way, state, others) for way in WAYS for state in STATES for others in OTHERS]
# With more ranks only the number of the others differs.
ROWS += matrix(
    *((4, way, "a collective", "in a collective") for way in WAYS),
    *((4, "SIGKILL", state, others) for state in ("Python", "sleep") for others in OTHERS),
)


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """A pool of that many ranks, all alive before and after each test."""
    with WorkerPool(request.param, device="cpu", replace=True) as shared:
        yield shared


def death_in(error: WorkerDiedError) -> RankFailure:
    (death,) = [failure for failure in error.failures if failure.kind == "died"]
    return death


def check_death(death: RankFailure, way: str) -> None:
    assert death.rank == VICTIM
    if way == "exit":
        assert (death.exitcode, death.type_name) == (17, "exit code 17")
    else:
        assert (death.exitcode, death.type_name) == (-signal.Signals[way], way)
    assert death.last_output.splitlines()[-1] == f"rank {VICTIM} says goodbye"


def check_way_back(pool: WorkerPool, before: dict[int, int]) -> None:
    """Require that the survivors live, the pool refuses work with advice, and a restart gives a working world."""
    assert pool.dead_ranks == (VICTIM,)
    assert all(lives(process(pid)) == (rank != VICTIM) for rank, pid in before.items())
    with pytest.raises(PoolStateError, match=r"rank 1 is dead .*pool\.restart\(\) gives fresh ranks"):
        pool.run(lambda: 1)
    pool.restart()
    assert pool.dead_ranks == ()
    assert not set(before.values()) & set(pool.pids.values())
    total = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"
    results = pool.run_cell(total, want_value=True, timeout_s=30)
    assert results is not None
    assert results.same() == float(pool.world_size)


@pytest.mark.parametrize(("pool", "way", "state", "others"), ROWS, indirect=["pool"])
def test_case_14_rank_dies_in_a_run(pool: WorkerPool, tmp_path: Path, way: str, state: str, others: str) -> None:
    stamp = tmp_path / "died_at"
    pool.push(stamp=str(stamp))
    pool.run_cell(PREPARE)
    before = pool.pids
    cell = f"def die():\n    {WAYS[way]}\n"
    cell += f"if rank == {VICTIM}:\n    watch({NAMES[state]!r})\n    {STATES[state]}\nelse:\n    {OTHERS[others]}"
    with pytest.raises(WorkerDiedError, match=r"rank 1: died") as caught:
        pool.run_cell(cell, timeout_s=60)
    reported = time.monotonic()
    error = caught.value
    assert reported - float(stamp.read_text()) < DEATH_S
    check_death(death_in(error), way)
    assert error.failed_ranks == (VICTIM,)
    survivors = tuple(rank for rank in range(pool.world_size) if rank != VICTIM)
    assert error.finished == (survivors if others == "finished" else ())
    assert error.interrupted_ranks == (() if others == "finished" else survivors)
    assert "pool.restart()" in str(error)
    if others == "in a collective":
        assert re.search(rf"\bwait(s|ed)? in .+ at Cell In\[1\], line {len(cell.splitlines())}\b", error.diagnosis)
    check_way_back(pool, before)
