"""Pools for the process tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from labkit import WorkerPool
from labkit.controller.start.launchers import fork_server

# This variable would also remove the buffer of C's stdout, so late text would not be tested.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """One fork server for all process tests. It outlives every pool, so it does not count as a leak of a test."""
    if fork_server.available():
        fork_server.shared()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """One pool of two CPU ranks for all tests of a file; a test sees the variables that earlier ones left on the ranks."""
    with WorkerPool(2, device="cpu", replace=True) as shared:
        yield shared
