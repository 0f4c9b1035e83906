"""Pools for the process tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labkit import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """One pool of two CPU ranks for all tests of a file; what a test leaves on the ranks the next one sees."""
    with WorkerPool(2, device="cpu", replace=True) as shared:
        yield shared
