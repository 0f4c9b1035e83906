"""The rows of tests/process/test_interrupt_training.py on GPUs: on NCCL, or over gloo where there are fewer GPUs than ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import WorkerPool
from tests.process import interrupt_scenarios as scenarios
from tests.process.test_interrupt_training import CUTS, ON_FOUR, ON_TWO, VARIANTS, cut_and_compare

FUSED: tuple[scenarios.Kind, ...] = ("fsdp2_fused", "fsdp1_fused", "ddp_fused")
ROWS = [
    *((2, kind, cut) for kind in ON_TWO for cut in CUTS),
    (2, "fsdp2", "all stuck in backward"),
    *((2, kind, "stuck in backward") for kind in VARIANTS),
    # A fused optimizer's step is queued behind backward; on a CPU it is a step like any other.
    *((2, kind, cut) for kind in FUSED for cut in CUTS),
    *((4, kind, cut) for kind in ON_FOUR for cut in CUTS),
]

pytestmark = pytest.mark.gpu(1)


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    with WorkerPool(request.param, device="cuda", replace=True) as shared:
        yield shared


@pytest.mark.parametrize(("pool", "kind", "cut"), ROWS, indirect=["pool"])
def test_a_step_that_is_cut_leaves_no_trace(pool: WorkerPool, kind: scenarios.Kind, cut: scenarios.Cut, tmp_path: Path) -> None:
    cut_and_compare(pool, kind, cut, tmp_path)
