"""Hangs, deaths and ways back on GPUs: the tables of tests/process for two ranks, on NCCL where each has a GPU of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from labkit import RankFailedError, RunTimeoutError, WorkerDiedError, WorkerPool

pytestmark = pytest.mark.gpu(1)

# The design's bound on GPUs is 5 s from the request to the end of the cell; a loaded machine gets twice that.
ENDS_WITHIN_S = 10.0
LIMIT_S = 3.5
IMPORTS = "import os, signal, time, torch, torch.distributed as dist\n"
STATE = "kept = torch.full((4,), float(rank), device=device)\nbig = torch.ones(1000, device=device)"

HANGS = {
    "all_reduce then synchronize": ("if rank == 0:\n    dist.all_reduce(big)\n    torch.cuda.synchronize()", "all_reduce"),
    "all_reduce then the cell ends": ("if rank == 0:\n    dist.all_reduce(big)", "all_reduce"),
    "all_reduce then item": ("if rank == 0:\n    dist.all_reduce(big)\n    big.sum().item()", "all_reduce"),
    "barrier": ("if rank == 0:\n    dist.barrier()", "barrier"),
    "all_gather": (
        "if rank == 0:\n    dist.all_gather([big.clone(), big.clone()], big)\n    torch.cuda.synchronize()",
        "all_gather",
    ),
    "gloo all_reduce": ("if rank == 0:\n    dist.all_reduce(torch.ones(3))", "all_reduce"),
    "send without receiver": ("if rank == 0: dist.send(big, 1)\ntorch.cuda.synchronize()", ""),
}
ON_NCCL_ONLY = ("send without receiver",)  # gloo puts a short message into the other rank's socket and goes on
DEATHS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", -11),
    "os._exit": ("os._exit(7)", 7),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cuda", replace=True) as pool:
        yield pool


@pytest.fixture
def pool(shared: WorkerPool) -> WorkerPool:
    if shared.dead_ranks:
        shared.restart()
    shared.run_cell(IMPORTS + STATE)
    return shared


def assert_goes_on(pool: WorkerPool) -> None:
    """Require that variables are kept, and that a collective on the GPU and one on the CPU work."""
    both = "sums = kept.clone(), kept.cpu()\nfor item in sums: dist.all_reduce(item)\n"
    source = IMPORTS + both + "[float(item[0]) for item in sums], float(kept[0])"
    results = pool.run_cell(source, want_value=True, timeout_s=60)
    assert results is not None
    assert dict(results) == {rank: ([1.0, 1.0], float(rank)) for rank in range(2)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu(2)) if name in ON_NCCL_ONLY else name for name in HANGS])
def test_stuck_rank_is_freed_and_keeps_its_variables(pool: WorkerPool, name: str) -> None:
    source, collective = HANGS[name]
    began = time.monotonic()
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell(source, timeout_s=LIMIT_S)
    assert time.monotonic() - began < LIMIT_S + ENDS_WITHIN_S
    assert caught.value.interrupted_ranks == (0,)
    assert collective in caught.value.diagnosis, caught.value
    assert_goes_on(pool)


def test_rank_that_raises_frees_the_one_that_waits(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell("if rank == 1: raise ValueError('planted')\ndist.all_reduce(big)")
    assert caught.value.failed_ranks == (1,)
    assert caught.value.interrupted_ranks == (0,)
    assert_goes_on(pool)


def test_long_kernel_is_no_hang(pool: WorkerPool) -> None:
    pool.run_cell("torch.cuda._sleep(int(4e9))\ndist.all_reduce(kept.clone())", timeout_s=60)
    assert_goes_on(pool)


@pytest.mark.parametrize("name", DEATHS)
def test_death_frees_the_other_rank_and_the_dead_one_can_be_replaced(pool: WorkerPool, name: str) -> None:
    source, exitcode = DEATHS[name]
    began = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell(f"if rank == 1:\n    {source}\ndist.all_reduce(big)\ntorch.cuda.synchronize()")
    assert time.monotonic() - began < ENDS_WITHIN_S
    died = next(failure for failure in caught.value.failures if failure.kind == "died")
    assert (died.rank, died.exitcode) == (1, exitcode)
    pool.restart([1])
    pool.run_cell(IMPORTS + "if rank == 1:\n    kept = torch.full((4,), float(rank), device=device)")
    assert_goes_on(pool)


@pytest.fixture(scope="module")
def theirs() -> torch.Tensor:
    """A tensor of this process, whose CUDA context stays open; set up before the leak guard looks."""
    return torch.ones(4, device="cuda:0")


@pytest.mark.gpu(1)
def test_case_1_notebook_that_uses_cuda_itself_can_start_ranks_that_do(theirs: torch.Tensor, num_ranks: int) -> None:
    with WorkerPool(num_ranks, device="cuda", replace=True) as pool:
        pool.run_cell("import torch, torch.distributed as dist\ntotal = torch.ones(4, device=device)\ndist.all_reduce(total)")
        assert pool.pull("total.sum().item()") == dict.fromkeys(range(num_ranks), 4.0 * num_ranks)
    assert theirs.sum().item() == 4.0
