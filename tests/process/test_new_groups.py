"""Groups that the ranks make differently are reported as such, and no rank dies of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import RankFailedError, RunTimeoutError, WorkerPool

RIGHT_WAY = """
made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
ones = torch.ones(1)
dist.all_reduce(ones, group=made[rank // 2])
dist.all_reduce(ones, group=made[2 + rank % 2])
(kept, float(ones))
"""
PAIRS = "g = dist.new_group([0, 1] if rank < 2 else [2, 3])\n"
DIFFERENT = {
    "pairs, and another group": PAIRS + "h = dist.new_group([0, 2])",
    "pairs, used at once": "r = rank // 2\ng = dist.new_group([2 * r, 2 * r + 1])\ndist.all_reduce(torch.ones(1), group=g)",
    "pairs, and a barrier of all": PAIRS + "dist.barrier()",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerPool]:
    with WorkerPool(4, device="cpu", replace=True) as pool:
        pool.run_cell("import torch, torch.distributed as dist\nkept = rank * 10")
        yield pool


@pytest.fixture
def pool(shared: WorkerPool) -> Iterator[WorkerPool]:
    """A pool whose ranks have lived through the test, with their variables, and make groups together."""
    before = shared.pids
    yield shared
    results = shared.run_cell(RIGHT_WAY, want_value=True, timeout_s=60)
    assert results is not None
    assert dict(results) == {rank: (rank * 10, 4.0) for rank in range(4)}
    assert shared.pids == before


@pytest.mark.parametrize("attempt", range(3))
@pytest.mark.parametrize("way", DIFFERENT)
def test_p3_p17_pairs_that_make_different_groups_are_named_and_live_on(pool: WorkerPool, way: str, attempt: int) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell(DIFFERENT[way], timeout_s=60)
    errors = [failure for failure in caught.value.failures if failure.kind == "exception"]
    assert errors
    for failure in errors:
        assert failure.type_name == "ValueError"
        assert "made different groups in the same new_group call: " in failure.message
        assert "ranks 0-1 of [0, 1], ranks 2-3 of [2, 3]" in failure.message
        assert "Every rank has to make every group in the same order" in failure.message


def test_p3_groups_of_one_rank_each_may_differ_and_are_kept_through_a_stop(pool: WorkerPool) -> None:
    total = "[float(dist.all_reduce(t := torch.ones(1), group=g) or t) for g in (half, alone)]"
    made = pool.run_cell(
        "half, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])\nalone, _ = dist.new_subgroups(1, group=half)\n"
        f"{total}, dist.get_process_group_ranks(alone)",
        want_value=True,
        timeout_s=60,
    )
    assert made is not None
    assert dict(made) == {rank: ([2.0, 1.0], [rank]) for rank in range(4)}
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell("if rank:\n    dist.barrier()", timeout_s=1.0)
    assert "cannot be" not in str(caught.value)
    assert "exists only on" not in str(caught.value)
    again = pool.run_cell(total, want_value=True, timeout_s=60)
    assert again is not None
    assert again.same() == [2.0, 1.0]


def test_p3_groups_that_share_some_ranks_are_named_and_who_waits_for_the_others_is_freed(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell("g = dist.new_group([0, 1, 2] if rank < 2 else [1, 2, 3])", timeout_s=60)
    assert "ranks 0-1 of [0, 1, 2], ranks 2-3 of [1, 2, 3]" in str(caught.value)


def test_p17_ranks_that_wait_in_new_group_for_one_that_does_not_come_are_freed(pool: WorkerPool) -> None:
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell("if rank != 3:\n    g = dist.new_group([0, 1, 2, 3])", timeout_s=1.0)
    assert (caught.value.interrupted_ranks, caught.value.finished) == ((0, 1, 2), (3,))


def test_p18_records_of_a_default_group_that_is_gone_are_not_compared(tmp_path: Path) -> None:
    anew = f"""
import torch, torch.distributed as dist
dist.all_reduce(torch.ones(1))
for turn in (1, 2):
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path)!r} + f"/{{turn}}", 2), rank=rank, world_size=2)
    for _ in range(3 - turn):
        dist.all_reduce(torch.ones(1))
"""
    with WorkerPool(2, device="cpu", replace=True) as own:
        own.run_cell(anew, timeout_s=60)
        with pytest.raises(RunTimeoutError) as caught:
            own.run_cell("if rank == 1:\n    dist.all_reduce(torch.ones(1))", timeout_s=1.0, cell_number=1)
    assert caught.value.diagnosis == "rank 0 finished the cell; rank 1 waits in all_reduce #2 at Cell In[1], line 2 for it."
