"""Whatever the ranks wait in, an interrupt ends the run, names the stopped ranks, and leaves every rank ready for the next run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import RunInterrupted, RunTimeoutError, WorkerPool
from tests.process import interrupt_scenarios as scenarios
from tests.process.interrupts import ENDS_WITHIN_S, ended, interrupt_when, signs_of
from tests.process.patience import until

COLLECTIVES = ("all_reduce", "barrier", "all_gather", "reduce_scatter", "new_group")  # with all ranks in it, it would end
RANKS = {"one": (1,), "half": (0, 2), "all but one": (1, 2, 3), "all": (0, 1, 2, 3)}
ROWS = [(what, who) for what in scenarios.WAITS for who in RANKS if who != ("all" if what in COLLECTIVES else "all but one")]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, device="cpu", replace=True) as shared:
        yield shared


def lives_on(pool: WorkerPool) -> dict[int, dict[str, object]]:
    """Require that every rank kept its variables and works in collectives; return the variables."""
    results = pool.run(scenarios.look, pool.device, timeout_s=30)
    assert {rank: (kept["before"], total) for rank, (kept, total) in results.items()} == {
        rank: (rank * 3, pool.world_size) for rank in range(pool.world_size)
    }
    return {rank: kept for rank, (kept, _) in results.items()}


@pytest.mark.parametrize(("what", "who"), ROWS)
def test_an_interrupt_ends_the_wait_and_the_ranks_live_on(pool: WorkerPool, what: str, who: str, tmp_path: Path) -> None:
    ranks = RANKS[who]
    others = tuple(rank for rank in range(4) if rank not in ranks)
    arrived = signs_of(tmp_path, len(ranks))
    interrupted = interrupt_when(
        pool,
        lambda: arrived() and ended(pool, others),
        lambda: pool.run(scenarios.wait, what, ranks, pool.device, str(tmp_path)),
    )
    error = interrupted.error
    assert type(error) is RunInterrupted
    assert (error.interrupted_ranks, error.failed_ranks) == (ranks, ())
    assert error.finished == others
    assert {failure.kind for failure in error.failures} == {"interrupted"}
    assert interrupted.took_s < ENDS_WITHIN_S
    kept = lives_on(pool)
    # A worker that a DataLoader has ended may die a moment later; each run begins by collecting those that have.
    until(lambda: not sum(pool.run(scenarios.zombies, timeout_s=30).values()), "no child is left uncollected", 20)
    for rank in ranks:
        assert what != "Python loop" or kept[rank]["rounds"]
        assert what != "handler that tidies up" or kept[rank]["tidied"]
        assert what != "handler that swallows" or kept[rank]["swallowed"] == 2


@pytest.mark.parametrize("what", ["time.sleep", "all_reduce"])
def test_a_time_limit_ends_the_wait_like_an_interrupt(pool: WorkerPool, what: str, tmp_path: Path) -> None:
    with pytest.raises(RunTimeoutError) as caught:
        pool.run(scenarios.wait, what, [2], pool.device, str(tmp_path), timeout_s=0.5)
    error = caught.value
    assert error.timeout_s == 0.5
    assert (error.interrupted_ranks, error.failed_ranks, error.finished) == ((2,), (), (0, 1, 3))
    lives_on(pool)
