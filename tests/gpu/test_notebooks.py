"""The notebooks run on GPUs as they are: only ``world_size`` and ``device`` are given.

With as many ranks as there are GPUs, at most two. On one rank the labs on sharding say that nothing is cut, and pass. The lab
on several machines cannot divide anything on one rank, so it needs two. Then with four ranks, which share GPUs if there are fewer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.course.running.runner import run_notebooks
from tests.notebooks.conventions import NOTEBOOKS, ROOT

pytestmark = pytest.mark.timeout(340)

OUT = ROOT / "build" / "tests" / "gpu"
NEEDS_TWO = [path for path in NOTEBOOKS if path.stem == "07_two_machines"]
BY_GPUS = [pytest.param(path, id=path.stem, marks=pytest.mark.gpu(2 if path in NEEDS_TWO else 1)) for path in NOTEBOOKS]


def run_on(path: Path, world_size: int) -> None:
    (result,) = run_notebooks([path], OUT, parameters={"world_size": world_size, "device": "cuda"}, timeout_s=300)
    assert result.passed, result.error


@pytest.mark.parametrize("path", BY_GPUS)
def test_runs_on_as_many_ranks_as_there_are_gpus(path: Path, num_ranks: int) -> None:
    run_on(path, num_ranks)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path not in NEEDS_TWO], ids=lambda path: path.stem)
def test_runs_on_four_ranks(path: Path) -> None:
    run_on(path, 4)
