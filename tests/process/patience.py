"""Waiting with a deadline, for tests that share the machine with others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

# labkit's promised times hold on a quiet machine. Tests run on busy ones too, so each is multiplied by this.
LOAD = 10.0
DEATH_S = 0.5 * LOAD
ORPHANS_S = 2.0 * LOAD


def until(condition: Callable[[], object], what: str, limit_s: float = 20.0) -> None:
    """Poll until the condition holds.

    Args:
        condition: The condition to wait for.
        what: The condition in words, for the failure.
        limit_s: The longest wait in seconds.

    Raises:
        AssertionError: It did not hold in time.
    """
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(0.01)


def process(pid: int) -> psutil.Process | None:
    """The process with this pid, for :func:`lives`; another process that gets the same pid later is not mistaken for it."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def lives(found: psutil.Process | None) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return found is not None and found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def survivors(processes: Iterable[psutil.Process | None]) -> list[psutil.Process]:
    """Return the processes that still run."""
    return [found for found in processes if found is not None and lives(found)]
