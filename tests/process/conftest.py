"""Pools for the process tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from labkit import WorkerPool

# It takes the buffer from C's stdout as well, and with it a reason why text may be late.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """One pool of two CPU ranks for all tests of a file; what a test leaves on the ranks the next one sees."""
    with WorkerPool(2, device="cpu", replace=True) as shared:
        yield shared
