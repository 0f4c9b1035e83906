"""Activation offload at a smaller and a larger width than that of tests/gpu/test_offload.py, which makes this table for 2,048.

Nothing moved, torch's wrappers, trl's streams where it is installed, and labkit's ways.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import labkit
from tests.benchmarks.gpu_steps import DEVICE, NUM_RANKS, REHEARSAL, wide
from tests.benchmarks.table import Figures
from tests.gpu.offload_figures import measure_ways

pytestmark = [pytest.mark.timeout(400), *([] if REHEARSAL else [pytest.mark.gpu(1)])]


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(NUM_RANKS, device=DEVICE, replace=True) as pool:
        yield pool


@pytest.mark.parametrize("dim", [1024, 4096])
def test_every_way_at_a_width(pool: labkit.WorkerPool, dim: int) -> None:
    figures = Figures(f"GPU-offload-{dim} (12 blocks of {dim}, 4 x 2048 tokens a rank, bfloat16, FSDP2, {NUM_RANKS} ranks)")
    try:
        measure_ways(pool, figures, wide(dim))
    finally:
        figures.finish()
