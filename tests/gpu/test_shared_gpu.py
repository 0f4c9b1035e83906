"""Four ranks share one GPU: each collective is right there, and ranks are freed, replaced and ended as on the CPU."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest
import torch

from labkit import RankFailedError, RunTimeoutError, WorkerDiedError, WorkerPool
from labkit.notebook.views.pool_status import rank_statuses
from tests.process import collective_scenarios as scenarios
from tests.process.collective_scenarios import AS_FLOAT32, DTYPES, HANGS, OPS, OTHERS, WORLD_SIZE, Setting

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

LIMIT_S = 3.0
ENDS_WITHIN_S = 10.0
IMPORTS = "import os, signal, time, torch, torch.distributed as dist\n"


@pytest.fixture(scope="module")
def shared(one_gpu: None) -> Iterator[WorkerPool]:
    with WorkerPool(WORLD_SIZE, replace=True) as pool:
        yield pool


@pytest.fixture
def pool(shared: WorkerPool) -> WorkerPool:
    if shared.closed or shared.dead_ranks:
        shared.restart()
    shared.run_cell(IMPORTS + "kept = torch.full((4,), float(rank), device=device)\nbig = torch.ones(1 << 20, device=device)")
    return shared


def test_pool_says_what_it_chose_and_why(pool: WorkerPool) -> None:
    assert repr(pool).startswith("WorkerPool(world_size=4, device='cuda'): 4 ranks, one GPU shared, gloo through host memory")
    assert "NCCL needs one for each rank" in repr(pool)
    assert set(pool.pull("str(device), dist.get_backend()").values()) == {("cuda:0", "cpu:gloo,cuda:gloo")}
    assert [status.device for status in rank_statuses(pool)] == ["cuda:0"] * WORLD_SIZE


# -- collectives ------------------------------------------------------------------------------------------------------

WIDE = (torch.float32, torch.int64)
REDUCED = [(dtype, op) for dtype in DTYPES for op in OPS if op in ("SUM", "MAX") or dtype in WIDE]
TABLES = {
    "moves": [(Setting("cuda", dtype), Setting("cpu", dtype)) for dtype in DTYPES],
    "moves as bytes": [(Setting("cuda", dtype), Setting("cpu")) for dtype in AS_FLOAT32],
    "reductions": [(Setting("cuda", dtype, op), Setting("cpu", dtype, op)) for dtype, op in REDUCED],
    "reductions of float8": [(Setting("cuda", dtype), Setting("cpu")) for dtype in AS_FLOAT32[:2]],
}


@pytest.mark.parametrize("name", TABLES)
def test_collectives_give_what_the_group_of_the_cpu_gives(pool: WorkerPool, name: str) -> None:
    table = name.partition(" ")[0]
    names = ["all_reduce", "reduce_scatter_tensor"] if "float8" in name else list(getattr(scenarios, table.upper()))
    ours, theirs = zip(*TABLES[name], strict=True)
    found = pool.run(scenarios.differences, table, names, list(ours), list(theirs), timeout_s=200)
    assert not any(found.values()), "\n".join(found[0] or found[1])


@pytest.mark.parametrize("case", OTHERS)
def test_ways_to_call_them_give_what_the_group_of_the_cpu_gives(pool: WorkerPool, case: str) -> None:
    found = pool.run(scenarios.differences, "others", [case], [Setting("cuda")], [Setting("cpu")], timeout_s=100)
    assert not any(found.values()), found


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_collectives_give_what_eager_ones_give(pool: WorkerPool, backend: str) -> None:
    def compare() -> list[bool]:
        import torch._inductor.config
        import torch.distributed as dist

        torch._inductor.config.compile_threads = 1  # no processes of its own
        tensor = Setting("cuda").tensor(WORLD_SIZE, 3)

        def plain(tensor: torch.Tensor) -> torch.Tensor:
            total = tensor * 2
            dist.all_reduce(total)
            return total + 1

        calls = [scenarios.functional_calls, lambda tensor: (plain(tensor),)]
        compared = []
        for call in calls:
            eager, compiled = call(tensor), torch.compile(call, backend=backend, fullgraph=True)(tensor)
            compared += [torch.equal(one, other) for one, other in zip(eager, compiled, strict=True)]
        return compared

    for compared in pool.run(compare, timeout_s=200).values():
        assert len(compared) > 8
        assert all(compared), compared


def test_what_is_queued_before_a_collective_is_in_it_and_nothing_after_it_is(pool: WorkerPool) -> None:
    """The copies keep the order of the GPU's queue, on any stream."""
    source = """
side = torch.cuda.Stream()
right = []
for _ in range(20):
    tensor = torch.zeros(1 << 20, device=device)
    torch.cuda._sleep(20_000_000)
    tensor += rank
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    tensor *= 2
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor += 1
        dist.all_reduce(tensor)
        tensor += 1
    torch.cuda.current_stream().wait_stream(side)
    right.append(bool((tensor == 4 * (2 * 6 + 1) + 1).all()))
all(right)
"""
    results = pool.run_cell(source, want_value=True, timeout_s=60)
    assert results is not None
    assert set(results.values()) == {True}


# -- what is stuck, and what fails ------------------------------------------------------------------------------------

ON_GPU = HANGS | {
    "functional": (
        "import torch.distributed._functional_collectives as functional\n"
        "if rank != 1: functional.all_reduce(big, 'sum', dist.group.WORLD) + 1"
    ),
}


def assert_goes_on(pool: WorkerPool) -> None:
    both = "sums = kept.clone(), kept.cpu()\nfor item in sums: dist.all_reduce(item)\n"
    source = both + "[float(item[0]) for item in sums], float(kept[0])"
    results = pool.run_cell(source, want_value=True, timeout_s=30)
    assert results is not None
    assert dict(results) == {rank: ([6.0, 6.0], float(rank)) for rank in range(WORLD_SIZE)}


@pytest.mark.parametrize("name", ON_GPU)
def test_stuck_ranks_are_freed_and_keep_their_variables(pool: WorkerPool, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell(ON_GPU[name], timeout_s=LIMIT_S)
    print(f"\n{name}: {time.monotonic() - began - LIMIT_S:.2f} s after the limit\n{caught.value}")
    assert time.monotonic() - began < LIMIT_S + ENDS_WITHIN_S
    assert caught.value.interrupted_ranks == (0, 2, 3)
    assert_goes_on(pool)


def test_rank_that_raises_frees_those_that_wait(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell("if rank == 1: raise ValueError('planted')\ndist.all_reduce(big)")
    assert caught.value.failed_ranks == (1,)
    assert_goes_on(pool)


def test_death_frees_the_others_and_a_new_rank_joins(pool: WorkerPool) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerDiedError):
        pool.run_cell("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(big)")
    died_s, began = time.monotonic() - began, time.monotonic()
    pool.restart([1])
    print(f"\ndeath to the end of the cell {died_s:.2f} s, the rank replaced in {time.monotonic() - began:.2f} s")
    pool.run_cell(IMPORTS + "if rank == 1: kept = torch.full((4,), float(rank), device=device)")
    assert_goes_on(pool)


def test_living_rank_can_be_replaced(pool: WorkerPool) -> None:
    pool.restart([0, 3])
    pool.run_cell(IMPORTS + "if rank in (0, 3): kept = torch.full((4,), float(rank), device=device)")
    assert_goes_on(pool)


def test_out_of_memory_on_one_rank_frees_the_others(pool: WorkerPool) -> None:
    source = (
        "blocks = []\nwhile rank == 0: blocks.append(torch.empty(1 << 32, dtype=torch.uint8, device=device))\ndist.all_reduce(big)"
    )
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell(source, timeout_s=60)
    assert caught.value.failed_ranks == (0,)
    pool.run_cell("blocks = None\ntorch.cuda.empty_cache()")
    assert_goes_on(pool)


def test_memory_of_the_gpu_is_back_after_close(one_gpu: None) -> None:
    def in_use() -> int:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)

    WorkerPool(WORLD_SIZE, device="cuda", replace=True).close()
    before = in_use()
    pool = WorkerPool(WORLD_SIZE, device="cuda")
    print(f"\neach rank's context takes {(in_use() - before) / WORLD_SIZE:.0f} MiB")
    pool.run_cell("import torch\nbig = torch.empty(1 << 28, device=device)")
    assert in_use() > before + 4000
    pool.close()
    deadline = time.monotonic() + 5.0
    while in_use() > before + 100 and time.monotonic() < deadline:
        pass
    assert in_use() <= before + 100


def test_agents_start_ranks_that_share_too(one_gpu: None) -> None:
    with WorkerPool(2, device="cuda", launcher="agents", replace=True) as pool:
        pool.run_cell("import torch, torch.distributed as dist\ntotal = torch.ones(4, device=device)\ndist.all_reduce(total)")
        assert pool.pull("str(device), float(total.sum())") == dict.fromkeys(range(2), ("cuda:0", 8.0))


@pytest.mark.gpu(2)
def test_four_ranks_share_two_gpus_two_each() -> None:
    with WorkerPool(4, device="cuda", replace=True) as pool:
        assert pool.pull("str(device)") == {0: "cuda:0", 1: "cuda:1", 2: "cuda:0", 3: "cuda:1"}
        pool.run_cell(IMPORTS + "kept = torch.full((4,), float(rank), device=device)\nbig = torch.ones(1 << 20, device=device)")
        total = "total = kept.clone(); dist.all_reduce(total); float(total[0])"
        results = pool.run_cell(total, want_value=True, timeout_s=30)
        assert results is not None
        assert dict(results) == dict.fromkeys(range(4), 6.0)
        with pytest.raises(RunTimeoutError):
            pool.run_cell(HANGS["all_reduce"], timeout_s=LIMIT_S)
        assert_goes_on(pool)
        pool.restart([1])
        assert pool.pull("str(device)")[1] == "cuda:1"
