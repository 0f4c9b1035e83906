"""Memory of a GPU: running out of it is an error of that rank only, and its memory is freed after an error and after close.

As many ranks as there are GPUs, at most two: none of this needs a peer, but with one it shows that the peer is freed.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from labkit import RankFailedError, WorkerPool

pytestmark = pytest.mark.gpu(1)

SETUP = """
import torch
import torch.distributed as dist

kept = torch.full((4,), float(rank), device=device)

def step(size_bytes):
    activations = []
    while True:
        activations.append(torch.empty(size_bytes, dtype=torch.uint8, device=device))
"""
TRAIN = "if rank == 0:\n    step(1 << 30)\ndist.all_reduce(kept.clone())"
IN_USE = "torch.cuda.memory_allocated()"
FREE = "torch.cuda.empty_cache()\ntorch.cuda.mem_get_info()[0]"


@pytest.fixture(scope="module")
def pool(num_ranks: int) -> Iterator[WorkerPool]:
    with WorkerPool(num_ranks, device="cuda", replace=True) as pool:
        pool.run_cell(SETUP)
        yield pool


def free_bytes(pool: WorkerPool) -> dict[int, int]:
    results = pool.run_cell(FREE, want_value=True)
    assert results is not None
    return dict(results)


def test_out_of_memory_names_the_rank_and_gives_everything_back(pool: WorkerPool) -> None:
    in_use, free = dict(pool.pull(IN_USE)), free_bytes(pool)
    for _ in range(2):  # a second time fills the same card again, so nothing of the first is left
        with pytest.raises(RankFailedError) as caught:
            pool.run_cell(TRAIN, timeout_s=60)
        error = caught.value
        print(f"\n{error}")
        assert error.failed_ranks == (0,)
        assert error.interrupted_ranks == tuple(range(1, pool.world_size))
        assert str(error).startswith("rank 0: torch.OutOfMemoryError: CUDA out of memory.")
        # The failed step's memory was held by its traceback; the reader does not have to free anything.
        assert dict(pool.pull(IN_USE)) == in_use
        now = free_bytes(pool)
        assert all(now[rank] > free[rank] - (64 << 20) for rank in free), (free, now)


def test_after_out_of_memory_the_pool_goes_on_with_its_variables(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError):
        pool.run_cell(TRAIN, timeout_s=60)
    results = pool.run_cell("total = kept.clone()\ndist.all_reduce(total)\nfloat(total[0]), float(kept[0])", want_value=True)
    assert results is not None
    assert dict(results) == {rank: (float(sum(range(pool.world_size))), float(rank)) for rank in range(pool.world_size)}


def test_memory_on_the_gpus_is_back_after_close(num_ranks: int) -> None:
    def in_use() -> list[int]:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()][:num_ranks]

    def is_back() -> bool:
        return all(now <= then + 100 for now, then in zip(in_use(), before, strict=True))

    # Close the pool of the other tests first, so that its memory does not count.
    WorkerPool(num_ranks, device="cuda", replace=True).close()
    before = in_use()
    pool = WorkerPool(num_ranks, device="cuda")
    pool.run_cell("import torch\nbig = torch.empty(1 << 30, device=device)")
    assert all(now > then + 900 for now, then in zip(in_use(), before, strict=True))
    pool.close()
    deadline = time.monotonic() + 5.0
    while not is_back() and time.monotonic() < deadline:
        pass
    assert is_back()
