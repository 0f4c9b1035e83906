"""Collectives through host memory give what the plain group gives, value by value, and are freed and mended like it.

Here CPU tensors take the place of a GPU's: the operators look their kernel up one step earlier. Functional collectives come below
that step, so they are compared on a GPU only (tests/gpu/test_shared_gpu.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from labkit import RankFailedError, RunTimeoutError, WorkerDiedError, WorkerPool
from tests.process import collective_scenarios as scenarios
from tests.process.collective_scenarios import AS_FLOAT32, DTYPES, HANGS, OPS, OTHERS, WORLD_SIZE, Setting

LIMIT_S = 3.0
ENDS_WITHIN_S = 10.0
NEEDS_A_GPU = ("functional_collectives", "functional_without_use", "differentiable")


def install() -> None:
    from labkit.worker.groups import through_host

    through_host.install("cpu", "AutogradCPU")


def outcomes(table: str, names: list[str], settings: list[Setting]) -> list[object]:
    return [scenarios.outcome(table, name, setting) for setting in settings for name in names]


@pytest.fixture(scope="module")
def plain() -> Iterator[WorkerPool]:
    with WorkerPool(WORLD_SIZE, device="cpu", replace=True) as pool:
        yield pool


MOVED = [Setting("cpu", dtype) for dtype in DTYPES]
BY_BYTES = [Setting("cpu", dtype) for dtype in AS_FLOAT32]
REDUCED = [
    Setting("cpu", dtype, op) for dtype in DTYPES for op in OPS if op in ("SUM", "MAX") or dtype in (torch.float32, torch.int64)
]
TABLES = {
    "moves": ("moves", list(scenarios.MOVES), MOVED, MOVED),
    "moves as bytes": ("moves", list(scenarios.MOVES), BY_BYTES, [Setting("cpu")] * len(BY_BYTES)),
    "reductions": ("reductions", list(scenarios.REDUCTIONS), REDUCED, REDUCED),
    "reductions of float8": ("reductions", ["all_reduce", "reduce_scatter_tensor"], BY_BYTES[:2], [Setting("cpu")] * 2),
    "others": ("others", [name for name in OTHERS if name not in NEEDS_A_GPU], [Setting("cpu")], [Setting("cpu")]),
}


def test_each_collective_gives_what_the_plain_group_gives(plain: WorkerPool) -> None:
    wanted = {name: plain.run(outcomes, *TABLES[name][:2], TABLES[name][3], timeout_s=120) for name in TABLES}
    plain.run(install)
    wrong = []
    for name, (table, cases, settings, _) in TABLES.items():
        found = plain.run(outcomes, table, cases, settings, timeout_s=120)
        labels = [(case, setting) for setting in settings for case in cases]
        for rank in range(WORLD_SIZE):
            for (case, setting), one, other in zip(labels, found[rank], wanted[name][rank], strict=True):
                if line := scenarios.difference(one, other, setting.dtype):
                    wrong.append(f"{name}, {case} {setting.dtype} {setting.op} on rank {rank}: {line}")
    assert not wrong, "\n".join(wrong[:40])


def test_nothing_holds_what_has_been_used(plain: WorkerPool) -> None:
    def work() -> list[bool]:
        import weakref

        import torch.distributed as dist

        tensors = [torch.ones(4), torch.ones(16), torch.ones(4), torch.ones(4)]
        left = [weakref.ref(tensor) for tensor in tensors]
        dist.all_reduce(tensors[0])
        dist.all_gather_into_tensor(tensors[1], tensors[0])
        works = [dist.irecv(tensors[2], (dist.get_rank() - 1) % 4), dist.isend(tensors[3], (dist.get_rank() + 1) % 4)]
        for one in works:
            assert one is not None
            one.wait()
        del works, one
        tensors.clear()
        return [reference() is None for reference in left]

    plain.run(install)
    assert plain.run(work).same() == [True] * 4


# -- what is stuck, and what fails ------------------------------------------------------------------------------------

IMPORTS = "import os, signal, time, torch, torch.distributed as dist\n"


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerPool]:
    with WorkerPool(WORLD_SIZE, device="cpu", replace=True) as pool:
        yield pool


@pytest.fixture
def pool(shared: WorkerPool) -> WorkerPool:
    if shared.closed or shared.dead_ranks:
        shared.restart()
    shared.run(install)
    shared.run_cell(IMPORTS + "kept = torch.full((4,), float(rank))\nbig = torch.ones(1 << 20)")
    return shared


def assert_goes_on(pool: WorkerPool) -> None:
    source = "total = kept.clone()\ndist.all_reduce(total)\nfloat(total[0]), float(kept[0])"
    results = pool.run_cell(source, want_value=True, timeout_s=30)
    assert results is not None
    assert dict(results) == {rank: (6.0, float(rank)) for rank in range(WORLD_SIZE)}


@pytest.mark.parametrize("name", HANGS)
def test_stuck_ranks_are_freed_and_keep_their_variables(pool: WorkerPool, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell(HANGS[name], timeout_s=LIMIT_S)
    assert time.monotonic() - began < LIMIT_S + ENDS_WITHIN_S
    assert caught.value.interrupted_ranks == (0, 2, 3)
    # A call that is waited for later is named by what the rank does now.
    assert ("wait" if name.endswith("later") else name) in caught.value.diagnosis, caught.value
    assert_goes_on(pool)


def test_rank_that_raises_frees_those_that_wait(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell("if rank == 1: raise ValueError('planted')\ndist.all_reduce(torch.ones(3))")
    assert caught.value.failed_ranks == (1,)
    assert_goes_on(pool)


def test_death_frees_the_others_and_a_new_rank_joins(pool: WorkerPool) -> None:
    with pytest.raises(WorkerDiedError):
        pool.run_cell("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(torch.ones(3))")
    pool.restart([1])
    pool.run(install)
    pool.run_cell(IMPORTS + "if rank == 1: kept = torch.full((4,), float(rank))")
    assert_goes_on(pool)
