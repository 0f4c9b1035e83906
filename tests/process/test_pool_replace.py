"""pool.restart(ranks): fresh processes for some ranks, while the others keep their variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import labkit
from labkit import PoolStateError, WorkerDiedError, WorkerPool
from tests.process.patience import until

IMPORTS = "import os, signal, torch, torch.distributed as dist"


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(3, device="cpu") as pool:
        pool.run_cell(f"{IMPORTS}\nkept = torch.full((2,), float(rank))")
        yield pool


def kill(pool: WorkerPool, *ranks: int) -> WorkerDiedError:
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell(f"if rank in {ranks}: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    return caught.value


def sum_of_ranks(pool: WorkerPool) -> float:
    source = f"{IMPORTS}\ntotal = torch.tensor(float(rank))\ndist.all_reduce(total)\ntotal.item()"
    results = pool.run_cell(source, want_value=True, timeout_s=60)
    assert results is not None
    return float(results.same())


def test_dead_rank_is_replaced_and_the_others_keep_their_variables(pool: WorkerPool) -> None:
    before = pool.pids
    error = kill(pool, 1)
    assert "pool.restart([1])" in str(error)
    pool.restart([1])
    assert pool.dead_ranks == ()
    assert {rank: pid == before[rank] for rank, pid in pool.pids.items()} == {0: True, 1: False, 2: True}
    assert pool.pull("'kept' in globals()") == {0: True, 1: False, 2: True}
    assert sum_of_ranks(pool) == 3.0


def test_living_rank_is_replaced(pool: WorkerPool) -> None:
    before = pool.pids[0]
    pool.restart(0)
    assert pool.pids[0] != before
    assert pool.pull("'kept' in globals()") == {0: False, 1: True, 2: True}
    assert sum_of_ranks(pool) == 3.0


@pytest.mark.parametrize("again", [False, True], ids=["destroyed", "made anew"])
def test_p9_rank_cannot_join_when_the_default_group_is_not_labkits_and_the_others_keep_their_variables(
    pool: WorkerPool, tmp_path: Path, again: bool
) -> None:
    pool.run_cell("dist.destroy_process_group()")
    before = pool.pids
    if again:
        store = f"dist.FileStore({str(tmp_path / 'store')!r}, world_size)"
        pool.run_cell(f"dist.init_process_group('gloo', store={store}, rank=rank, world_size=world_size)")
    gone = f"the default process group was {'made anew' if again else 'destroyed'} on ranks 0, 2"
    with pytest.raises(PoolStateError) as caught:
        pool.restart([1])
    assert str(caught.value).startswith(f"rank 1 cannot be replaced: {gone}")
    assert "Nothing was changed; pool.restart() gives fresh ranks and groups." in str(caught.value)
    assert pool.pids == before
    assert pool.pull("'kept' in globals()").same() is True
    psutil.Process(pool.pids[1]).kill()
    until(lambda: pool.dead_ranks == (1,), "the death is known")
    with pytest.raises(PoolStateError) as caught:
        pool.pull("kept")
    said = str(caught.value)
    assert said.startswith("rank 1 is dead (killed from outside; ")
    assert "pool.restart([1])" not in said
    assert f"pool.restart() gives fresh ranks. The dead alone cannot be replaced: {gone}." in said
    pool.restart()
    assert sum_of_ranks(pool) == 3.0


def test_p9_rank_that_dies_after_the_default_group_was_destroyed_is_reported_with_the_way_back_that_works(
    pool: WorkerPool,
) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell("dist.destroy_process_group()\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert "pool.restart([1])" not in str(caught.value)
    assert "the default process group was destroyed on ranks 0, 2" in str(caught.value)
    pool.restart()
    assert sum_of_ranks(pool) == 3.0


def test_dead_rank_that_is_not_named_is_refused(pool: WorkerPool) -> None:
    kill(pool, 0, 2)
    with pytest.raises(PoolStateError, match=r"rank 2 died as well.*pool\.restart\(\[0, 2\]\)"):
        pool.restart([0])
    pool.restart([0, 2])
    assert sum_of_ranks(pool) == 3.0


def test_groups_with_the_replaced_rank_are_named_and_refused_and_others_go_on(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run_cell("lost = dist.new_group([1, 2])\nsound = dist.new_group([0, 1])")
    kill(pool, 2)
    capsys.readouterr()
    pool.restart([2])
    told = capsys.readouterr().err
    assert "Rank 2 is new and has no variables" in told
    assert "has lost rank 2, replaced by a fresh one. Make it again" in told
    with pytest.raises(labkit.RankFailedError, match="has lost rank 2"):
        pool.run_cell("if rank == 1: dist.barrier(group=lost)", timeout_s=60)
    pool.run_cell("if rank < 2: dist.barrier(group=sound)", timeout_s=60)


def test_p20_group_with_a_tag_is_made_again_after_its_ranks_were_replaced(pool: WorkerPool) -> None:
    make = f"{IMPORTS}\nfrom torch.distributed.distributed_c10d import _new_group_with_tag\n"
    make += "tagged = _new_group_with_tag([0, 1, 2], pg_tag='mine')\n"
    make += "ones = torch.ones(1)\ndist.all_reduce(ones, group=tagged)\nones.item()"
    assert pool.run_cell(make, want_value=True).same() == 3.0  # type: ignore[union-attr]
    pool.run_cell("old = tagged")
    pool.restart([0, 2])
    assert pool.run_cell(make, want_value=True, timeout_s=60).same() == 3.0  # type: ignore[union-attr]
    with pytest.raises(labkit.RankFailedError, match="has lost ranks 0, 2"):
        pool.run_cell("dist.barrier(group=old)", ranks=1, timeout_s=60)
    pool.run_cell("dist.destroy_process_group(old)", ranks=1)
    pool.run_cell("dist.barrier(group=tagged)", timeout_s=60)


def test_many_groups_with_the_replaced_rank_are_told_in_one_line(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run_cell("groups = [dist.new_group([1, 2]) for _ in range(5)]")
    kill(pool, 2)
    capsys.readouterr()
    pool.restart([2])
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[1] == "5 process groups have lost a rank: make meshes, sharded models and groups again, on all ranks."
    with pytest.raises(labkit.RankFailedError, match="has lost rank 2"):
        pool.run_cell("if rank == 1: dist.barrier(group=groups[3])", timeout_s=60)


def test_what_living_ranks_hold_can_be_read_while_another_is_dead(pool: WorkerPool) -> None:
    pool.run_cell("kept = rank + 10")
    kill(pool, 1)
    with pytest.raises(labkit.PoolStateError, match="Ranks 0, 2 are alive; read their variables first with %%spmd --ranks 0,2"):
        pool.pull("kept")
    assert pool.pull("kept", ranks="0,2") == {0: 10, 2: 12}
    with pytest.raises(labkit.RankFailedError, match="ranks 0, 2: ZeroDivisionError"):
        pool.run_cell("1 / 0", ranks="0,2")
    with pytest.raises(labkit.RankFailedError, match=r"Connection closed by peer|Connection reset by peer|Broken pipe"):
        pool.run_cell("dist.barrier()", ranks="0,2", timeout_s=30)
    pool.restart([1])
    assert pool.pull("kept", ranks="0,2") == {0: 10, 2: 12}
    assert sum_of_ranks(pool) == 3.0


def test_restart_says_that_all_is_gone_and_that_a_closed_pool_is_open(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.restart()
    assert capsys.readouterr().out == "Ranks 0-2 are fresh and have no variables.\n"
    pool.close()
    pool.restart()
    assert capsys.readouterr().out == "The pool was closed and is open again; ranks 0-2 are fresh and have no variables.\n"


def test_new_groups_can_be_made_after_a_replacement(pool: WorkerPool) -> None:
    pool.run_cell("first = dist.new_group([0, 1])")
    kill(pool, 2)
    pool.restart([2])
    pool.run_cell(f"{IMPORTS}\nagain = dist.new_group([1, 2])\nif rank > 0: dist.barrier(group=again)", timeout_s=60)


def test_interrupt_after_a_replacement_is_mended(pool: WorkerPool) -> None:
    kill(pool, 1)
    pool.restart([1])
    sum_of_ranks(pool)
    with pytest.raises(labkit.RunTimeoutError, match="Every rank keeps its variables"):
        pool.run_cell("if rank != 1: dist.barrier()", timeout_s=1)
    assert sum_of_ranks(pool) == 3.0


def test_all_ranks_named_is_a_fresh_start(pool: WorkerPool) -> None:
    kill(pool, 0, 1, 2)
    pool.restart([0, 1, 2])
    assert pool.pull("'kept' in globals()").same() is False
    assert sum_of_ranks(pool) == 3.0


def test_p9_rank_that_does_not_answer_keeps_no_death_from_being_reported(pool: WorkerPool) -> None:
    kill(pool, 1)
    stopped = psutil.Process(pool.pids[2])
    stopped.suspend()
    try:
        with pytest.raises(PoolStateError, match=r"rank 1 is dead .*pool\.restart\(\[1\]\)"):
            pool.pull("kept", ranks=1)
    finally:
        stopped.resume()
    pool.restart([1])
    assert sum_of_ranks(pool) == 3.0
    assert pool.pull("kept", ranks=2)[2].tolist() == [2.0, 2.0]
