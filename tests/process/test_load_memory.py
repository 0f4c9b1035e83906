"""Memory comes back: on the ranks after an error, in the kernel after a result; many runs in a row leave nothing behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit import RankFailedError, RunInterrupted, RunTimeoutError, WorkerPool
from labkit.errors import RunReport
from tests.process.patience import LOAD, until

MIB = 2**20
BIG = 200 * MIB
# The amount by which a process's memory may differ for unrelated reasons: the allocator keeps some, torch loads some.
NOISE = 40 * MIB


def resident(pid: int | None = None) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def memory_files(pid: int) -> list[str]:
    """Payloads' memory files that a process has open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    return [name for name in found if "labkit-payload" in name]


# ---- on the ranks ----------------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[type[RunReport], str, float | None]] = {
    "in the frame": (RankFailedError, "def f():\n    big = make()\n    raise ValueError\nf()", None),
    "in the frame of a caller": (RankFailedError, "def f(big):\n    g()\ndef g():\n    1 / 0\nf(make())", None),
    "in the cause's frame": (
        RankFailedError,
        "def f():\n    big = make()\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as e:\n    raise ValueError from e",
        None,
    ),
    "in the error": (RankFailedError, "raise ValueError(make())", None),
    "in an exception group": (
        RankFailedError,
        "def f():\n    big = make()\n    raise ExceptionGroup('x', [ValueError(big)])\nf()",
        None,
    ),
    "interrupted in Python": (RunTimeoutError, "def f():\n    big = make()\n    while True: pass\nf()", 1.0),
    "freed from a collective": (
        RunTimeoutError,
        "def f():\n    big = make()\n    if rank == 0: dist.barrier()\n    time.sleep(1000)\nf()",
        1.0,
    ),
    "exit": (RankFailedError, "def f():\n    big = make()\n    raise SystemExit\nf()", None),
}


@pytest.mark.parametrize("way", ERRORS)
def test_case_15_memory_of_a_failed_cell_is_back_in_the_next_one(pool: WorkerPool, way: str) -> None:
    kind, cell, timeout_s = ERRORS[way]
    make = f"import time, torch, torch.distributed as dist\ndef make():\n    return torch.ones({BIG // 4})"
    pool.run_cell(make + "\n_ = make().sum()\ndel _")
    before = {rank: resident(pid) for rank, pid in pool.pids.items()}
    with pytest.raises(kind):
        pool.run_cell(cell, timeout_s=timeout_s)
    pool.run_cell("1")
    for rank, pid in pool.pids.items():
        assert resident(pid) - before[rank] < NOISE, f"rank {rank} keeps {(resident(pid) - before[rank]) / MIB:.0f} MiB"


def test_memory_of_a_displayed_value_is_back_in_the_next_cell(pool: WorkerPool) -> None:
    pool.run_cell("import torch")
    before = {rank: resident(pid) for rank, pid in pool.pids.items()}
    pool.run_cell(f"torch.ones({BIG // 4})")
    pool.run_cell("1")
    for rank, pid in pool.pids.items():
        assert resident(pid) - before[rank] < NOISE


def test_variable_of_the_cell_stays_and_its_memory_is_back_when_it_is_deleted(pool: WorkerPool) -> None:
    pool.run_cell("import torch")
    before = {rank: resident(pid) for rank, pid in pool.pids.items()}
    with pytest.raises(RankFailedError):
        pool.run_cell(f"kept = torch.ones({BIG // 4})\n1 / 0")
    for rank, pid in pool.pids.items():
        assert resident(pid) - before[rank] > BIG - NOISE
    pool.run_cell("del kept")
    for rank, pid in pool.pids.items():
        assert resident(pid) - before[rank] < NOISE


# ---- what travels ----------------------------------------------------------------------------------------------------


def big_on_every_rank() -> Any:
    import torch

    return torch.ones(BIG // 4)


def test_memory_of_a_result_is_back_on_both_sides(pool: WorkerPool) -> None:
    pool.run(lambda: 1)
    gc.collect()
    here, there = resident(), resident(pool.pids[0])
    values = pool.run(big_on_every_rank)
    assert values[1].sum() == BIG // 4
    del values
    gc.collect()
    assert resident() - here < NOISE
    until(lambda: not memory_files(pool.pids[0]), "the rank has closed the file of its result")
    assert resident(pool.pids[0]) - there < NOISE


def test_result_of_a_rank_whose_peer_failed_is_given_up(pool: WorkerPool) -> None:
    def fail_on_one() -> Any:
        import torch

        if rank == 1:  # type: ignore[name-defined]  # noqa: F821
            raise ValueError("boom")
        return torch.ones(BIG // 4)

    before = resident(pool.pids[0])
    with pytest.raises(RankFailedError, match="boom"):
        pool.run(fail_on_one)
    until(lambda: not memory_files(pool.pids[0]), "the rank has closed the file of the result that nobody wants")
    assert resident(pool.pids[0]) - before < NOISE


def test_pushed_variables_leave_no_memory_file_open(pool: WorkerPool) -> None:
    import os

    import torch

    before = resident()
    pool.push(large=torch.ones(BIG // 4))
    gc.collect()
    assert memory_files(os.getpid()) == []
    assert resident() - before < NOISE
    assert pool.pull("float(large.sum())").same() == BIG // 4
    pool.run_cell("del large")


# ---- many in a row ---------------------------------------------------------------------------------------------------


def growth(act: Callable[[], None], times: int, pids: list[int]) -> list[int]:
    """Return the growth of these processes while a function is called many times, after a quarter as many warm-up calls."""
    for _ in range(times // 4):
        act()
    gc.collect()
    before = [resident(pid) for pid in pids]
    for _ in range(times):
        act()
    gc.collect()
    return [resident(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]


def test_case_22_three_hundred_tiny_cells_in_a_row(pool: WorkerPool) -> None:
    pool.run_cell("count = 0")
    began = time.monotonic()
    grown = growth(lambda: pool.run_cell("count += 1"), 300, [psutil.Process().pid, *pool.pids.values()])
    assert time.monotonic() - began < 375 * 0.01 * LOAD
    assert pool.pull("count").same() == 375
    assert max(grown) < 10 * MIB


def test_case_22_many_results_of_a_megabyte_leave_the_kernel_flat(pool: WorkerPool) -> None:
    def megabyte() -> Any:
        import torch

        return torch.ones(MIB // 4)

    # All of them together would be 600 MiB here, and as much on the ranks.
    grown = growth(lambda: pool.run(megabyte).ranks and None, 300, [psutil.Process().pid, *pool.pids.values()])
    assert max(grown) < 20 * MIB


def test_many_failures_leave_both_sides_flat(pool: WorkerPool) -> None:
    def fail() -> None:
        with pytest.raises(RankFailedError):
            pool.run_cell("def f():\n    held = bytearray(1_000_000)\n    1 / 0\nf()")

    grown = growth(fail, 60, [psutil.Process().pid, *pool.pids.values()])
    assert max(grown) < 20 * MIB


def test_many_interrupts_leave_both_sides_flat(pool: WorkerPool) -> None:
    def interrupt() -> None:
        with pytest.raises((RunTimeoutError, RunInterrupted)):
            pool.run_cell("import torch.distributed as dist\nif rank == 0:\n    dist.barrier()", timeout_s=0.05)

    grown = growth(interrupt, 20, [psutil.Process().pid, *pool.pids.values()])
    assert max(grown) < 20 * MIB
