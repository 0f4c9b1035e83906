"""One run of a notebook for all tests that look at it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.course.running.execution import NotebookResult
from labkit.course.running.runner import run_notebooks
from tests.notebooks.conventions import ROOT

# The slowest takes about a minute on two free cores.
TIMEOUT_S = 400

Execute = Callable[[Path, int], NotebookResult]


@pytest.fixture(scope="session")
def execute() -> Execute:
    """Run a notebook with a number of ranks, once in a session; the executed copies stay in ``build/tests``."""
    results: dict[tuple[Path, int], NotebookResult] = {}

    def run(path: Path, world_size: int) -> NotebookResult:
        if (path, world_size) not in results:
            # They stay there so that the output of a failed run can be inspected.
            out = ROOT / "build" / "tests" / f"{world_size}-ranks"
            (out / path.name).unlink(missing_ok=True)
            (results[path, world_size],) = run_notebooks([path], out, parameters={"world_size": world_size}, timeout_s=TIMEOUT_S)
        return results[path, world_size]

    return run
