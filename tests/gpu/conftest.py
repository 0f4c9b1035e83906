"""What tests on GPUs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labkit import WorkerPool
from labkit.base import machine


@pytest.fixture(scope="session")
def num_ranks() -> int:
    """For what needs no second rank but is more telling with one: as many ranks as there are GPUs, at most two."""
    return min(2, len(machine.nvidia_gpus()))


@pytest.fixture(scope="module")
def pool(num_ranks: int) -> Iterator[WorkerPool]:
    """A pool of GPU ranks."""
    with WorkerPool(num_ranks, device="cuda", replace=True) as pool:
        yield pool
