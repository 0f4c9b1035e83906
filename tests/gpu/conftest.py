"""Fixtures that the tests on GPUs share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from labkit import WorkerPool
from labkit.base import machine


@pytest.fixture(scope="session")
def num_ranks() -> int:
    """One rank per GPU, at most two, for tests that need no second rank but show more with one."""
    return min(2, len(machine.nvidia_gpus()))


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[None]:
    """Let pools see one GPU only, so that their ranks share it on every machine."""
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    yield
    patch.undo()


@pytest.fixture(scope="module")
def pool(num_ranks: int) -> Iterator[WorkerPool]:
    """A pool of GPU ranks."""
    with WorkerPool(num_ranks, device="cuda", replace=True) as pool:
        yield pool
