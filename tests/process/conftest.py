"""Pools for the process tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from labkit import WorkerPool
from labkit.controller.start.launchers import fork_server

# It takes the buffer from C's stdout as well, and with it a reason why text may be late.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """One fork server for all process tests; it outlives every pool, so no test is to blame for it."""
    if fork_server.available():
        fork_server.shared()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """One pool of two CPU ranks for all tests of a file; what a test leaves on the ranks the next one sees."""
    with WorkerPool(2, device="cpu", replace=True) as shared:
        yield shared
