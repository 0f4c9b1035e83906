"""Interrupts of a run from a test, once the ranks have reached a place, and their time limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from labkit import WorkerPool
from labkit.errors import RunReport

# The design's bound on CPU is 2 s from the request to the end of the cell. Other work shares these cores.
PATIENCE = 5.0
ENDS_WITHIN_S = 2.0 * PATIENCE
ARRIVES_WITHIN_S = 10.0 * PATIENCE


@dataclass(frozen=True)
class Interrupted:
    """A run that was interrupted.

    Attributes:
        error: What it raised.
        took_s: Seconds from the request to the end of the run.
    """

    error: RunReport
    took_s: float


def interrupt_when(pool: WorkerPool, ready: Callable[[], bool], act: Callable[[], object]) -> Interrupted:
    """Run something, and interrupt it from another thread once it is ready for it.

    Raises:
        AssertionError: It did not become ready, or ended without an error.
    """
    asked_at = [0.0]
    over = threading.Event()

    def watch() -> None:
        deadline = time.monotonic() + ARRIVES_WITHIN_S
        while not ready() and not over.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)
        asked_at[0] = time.monotonic()
        pool.interrupt()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with pytest.raises(RunReport) as caught:
            act()
        ended_at = time.monotonic()
    finally:
        over.set()
        thread.join()
    assert asked_at[0] <= ended_at, "the run ended before it was interrupted"
    return Interrupted(caught.value, ended_at - asked_at[0])


def ended(pool: WorkerPool, ranks: Collection[int]) -> bool:
    """Return whether these ranks have ended the present run."""
    states = {state.rank: state.state for state in pool.diagnose().states}
    return all(states[rank] in ("finished", "failed") for rank in ranks)


def signs_of(folder: Path, ranks: int) -> Callable[[], bool]:
    """Return whether that many ranks have put their sign into a folder."""
    return lambda: len(list(folder.iterdir())) >= ranks
