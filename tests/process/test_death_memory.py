"""A rank that the system kills for lack of memory: the report names memory, the rank's size and the free memory.

A rank that somebody kills while the system kills another process for lack of memory is not reported like this.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from labkit import WorkerDiedError, WorkerPool
from labkit.errors import RankFailure
from tests.process.patience import until

LIMIT_BYTES = 100 * 2**20


def own_memory_group() -> Path:
    """The control group that accounts for this process's memory."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup") / next(path for _, controllers, path in lines if not controllers).lstrip("/")


@contextmanager
def small_group(limit_bytes: int) -> Iterator[Path]:
    """A control group of its own inside this process's, with room for little memory; only its own members can be killed."""
    group = own_memory_group() / f"labkit-test-{os.getpid()}"
    group.mkdir()
    try:
        limit = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
        (group / limit).write_text(str(limit_bytes))
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


def move(pid: int, group: Path) -> None:
    (group / "cgroup.procs").write_text(str(pid))


@functools.cache
def no_groups() -> str:
    """Return the reason why a process's memory cannot be limited here; empty if it can. Failures after that are errors."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            with small_group(LIMIT_BYTES) as group:
                try:
                    move(child.pid, group)
                finally:
                    child.kill()
        except (OSError, StopIteration) as error:
            return f"this machine lets nobody limit the memory of a control group: {error}"
        finally:
            child.kill()
    return ""


@pytest.fixture
def tiny_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    if reason := no_groups():
        pytest.skip(reason)
    with small_group(getattr(request, "param", LIMIT_BYTES)) as group:
        yield group


def died(pool: WorkerPool, cell: str) -> tuple[WorkerDiedError, RankFailure]:
    with pytest.raises(WorkerDiedError, match="rank 1: died") as caught:
        pool.run_cell(cell, timeout_s=60)
    (death,) = [failure for failure in caught.value.failures if failure.kind == "died"]
    assert (death.rank, death.exitcode) == (1, -signal.SIGKILL)
    return caught.value, death


# The fork server looks at the ranks' groups twice a second.
SEEN = "import time\ntime.sleep(1.2)"
KILLS_ITSELF = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
# In steps, so that the limit is met while the process runs.
EATS = "held = []\nwhile True: held.append(bytearray(b'x' * 2**20))"


def test_rank_that_is_killed_for_want_of_memory_is_reported_with_its_memory(tiny_group: Path) -> None:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        move(pool.pids[1], tiny_group)
        pool.run_cell(SEEN)
        cell = "import torch, torch.distributed as dist\nprint('about to ask for a lot', end='')\n"
        cell += "held = [torch.ones(2**20) for _ in range(400 if rank == 1 else 0)]\ndist.barrier()"
        error, death = died(pool, cell)
        assert death.message.startswith("the system killed it because memory ran out; its memory had reached 0.")
        assert "GiB are free now" in death.message
        assert death.last_output == "about to ask for a lot"
        assert error.interrupted_ranks == (0,)
        pool.restart()
        assert pool.run(lambda: 1).same() == 1


@pytest.mark.parametrize(("tiny_group", "together"), [(LIMIT_BYTES, False), (2**30, True)], indirect=["tiny_group"])
def test_c7_rank_that_is_killed_by_hand_while_memory_runs_out_for_another_process_is_not_blamed_on_memory(
    tiny_group: Path, together: bool
) -> None:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        if together:  # in one group the kernel's counter alone cannot tell the two apart
            move(pool.pids[1], tiny_group)
            pool.run_cell(SEEN)
        eater = subprocess.Popen([sys.executable, "-c", f"import sys\nsys.stdin.read(1)\n{EATS}"], stdin=subprocess.PIPE)
        move(eater.pid, tiny_group)
        eater.communicate(b"x", timeout=60)
        assert eater.returncode == -signal.SIGKILL
        _, death = died(pool, KILLS_ITSELF)
        assert death.message.startswith("killed from outside; its memory had reached 0.")
        assert "memory ran out" not in death.message
