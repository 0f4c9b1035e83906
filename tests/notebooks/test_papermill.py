"""Every notebook runs from top to bottom, solutions included, on several numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.course.parameters import known_parameters
from tests.notebooks.conftest import TIMEOUT_S, Execute
from tests.notebooks.conventions import NOTEBOOKS

# Three ranks divide nothing evenly.
WORLD_SIZES = (2, 3, 4)
# With one rank nothing is sharded, so only the first labs are tried with it.
ALONE = ("00", "01")

RUNS = [
    pytest.param(
        path,
        world_size,
        id=f"{path.stem}-{world_size}-ranks",
        marks=() if world_size == WORLD_SIZES[0] else pytest.mark.slow,
    )
    for path in NOTEBOOKS
    for world_size in (*((1,) if path.stem.startswith(ALONE) else ()), *WORLD_SIZES)
]


@pytest.mark.process
@pytest.mark.timeout(2 * TIMEOUT_S + 100)
@pytest.mark.parametrize(("path", "world_size"), RUNS)
def test_notebook_runs_from_top_to_bottom(path: Path, world_size: int, execute: Execute) -> None:
    result = execute(path, world_size)
    assert result.passed, f"{path.name} with {world_size} ranks {result.status}; executed copy: {result.executed}\n{result.error}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_the_parameter_that_these_tests_set(path: Path) -> None:
    assert "world_size" in known_parameters(path)
