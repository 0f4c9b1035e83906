"""A training step that is cut off has no effect: the next steps equal those of an undisturbed run bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import RankFailedError, RunInterrupted, WorkerPool
from tests.matrix import matrix
from tests.process import interrupt_scenarios as scenarios
from tests.process.interrupts import ARRIVES_WITHIN_S, ENDS_WITHIN_S, interrupt_when, signs_of

CUTS: tuple[scenarios.Cut, ...] = ("missing in forward", "raises in backward", "stuck in backward")
ON_TWO: tuple[scenarios.Kind, ...] = ("fsdp2", "fsdp1", "fsdp1_flat", "ddp")
ON_FOUR: tuple[scenarios.Kind, ...] = ("hsdp", "fsdp2_tp")
# One cut each: the one that leaves most behind.
VARIANTS: tuple[scenarios.Kind, ...] = ("fsdp2_mixed", "fsdp2_accumulating", "fsdp1_mixed", "ddp_static", "ddp_accumulating")
ROWS = [
    *((2, kind, cut) for kind in ON_TWO for cut in CUTS),
    (2, "fsdp2", "all stuck in backward"),
    *((2, kind, "stuck in backward") for kind in VARIANTS),
    *(row for kind in ON_FOUR for row in matrix(*((4, kind, cut) for cut in reversed(CUTS)))),
    # On more than two ranks the order of gloo's sums depends on a value's place in its buffer.
    *matrix(*((4, kind, "stuck in backward") for kind in ("fsdp2", "fsdp1", "ddp"))),
]


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    with WorkerPool(request.param, device="cpu", replace=True) as shared:
        yield shared


def undisturbed(pool: WorkerPool, kind: scenarios.Kind) -> None:
    """Save the states after two and after four steps of an uninterrupted run."""
    if not all(pool.run(lambda: kind in scenarios.LIVE).values()):
        pool.run(scenarios.make, kind, kind, pool.device)
        for steps in (2, 4):
            pool.run(scenarios.train, kind, 2, timeout_s=ARRIVES_WITHIN_S)
            pool.run(scenarios.save, kind)
            pool.run(lambda steps=steps: scenarios.SAVED.update({f"{kind} {steps}": scenarios.SAVED[kind]}))


def equal(pool: WorkerPool, saved: str) -> bool:
    found = pool.run(scenarios.compare, "cut", saved).values()
    assert all(comparison.num_values > 2000 for comparison in found)
    return all(comparison.num_different == comparison.gradients == 0 for comparison in found)


@pytest.mark.parametrize(("pool", "kind", "cut"), ROWS, indirect=["pool"])
def test_a_step_that_is_cut_leaves_no_trace(pool: WorkerPool, kind: scenarios.Kind, cut: scenarios.Cut, tmp_path: Path) -> None:
    cut_and_compare(pool, kind, cut, tmp_path)


def cut_and_compare(pool: WorkerPool, kind: scenarios.Kind, cut: scenarios.Cut, tmp_path: Path) -> None:
    """Cut a step, and require that the next steps equal an uninterrupted run."""
    undisturbed(pool, kind)
    pool.run(scenarios.make, "cut", kind, pool.device)
    pool.run(scenarios.train, "cut", 2, timeout_s=ARRIVES_WITHIN_S)
    if cut == "raises in backward":
        with pytest.raises(RankFailedError) as caught:
            pool.run(scenarios.cut_step, "cut", cut, str(tmp_path))
        assert caught.value.failed_ranks == (pool.world_size - 1,)
        error = caught.value
    else:
        ready = signs_of(tmp_path, pool.world_size)
        interrupted = interrupt_when(pool, ready, lambda: pool.run(scenarios.cut_step, "cut", cut, str(tmp_path)))
        assert isinstance(interrupted.error, RunInterrupted)
        assert interrupted.took_s < ENDS_WITHIN_S
        error = interrupted.error
    # A DDP model that no rank has cut in a backward has no gradients to drop.
    assert "dropped" in str(error) or (kind.startswith("ddp") and cut == "missing in forward")
    if kind.endswith("fused"):
        # On a GPU such a step is queued, so its loss may be noted although the step had no effect.
        pool.run(scenarios.keep_losses, "cut", 2)
    assert equal(pool, f"{kind} 2")
    pool.run(scenarios.train, "cut", 2, timeout_s=ARRIVES_WITHIN_S)
    assert equal(pool, f"{kind} 4")
