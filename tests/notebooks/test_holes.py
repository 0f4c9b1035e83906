"""Every unsolved exercise on the ranks is refused by its check in the same words."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest

import labkit
from labkit.course.handouts.copies.solutions import with_holes
from labkit.errors import ExerciseError
from tests.notebooks.exercises import FOLDER


def exercises_on_ranks() -> Iterator[Any]:
    """The name, source and check of each exercise; the check is the one that the next checking cell calls."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        source = ""
        for cell in nbformat.read(path, as_version=4).cells:
            tags = cell.metadata.get("tags", ())
            if "exercise" in tags:
                source = cell.source
            elif "check" in tags and source.startswith("%%spmd"):
                lab, check = re.findall(r"\b(lab\d+)\.(check_\w+)\(", cell.source)[0]
                yield pytest.param(source, lab, check, id=f"{lab}.{check}")
                source = ""


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(2, device="cpu", replace=True) as pool:
        pool.run_cell("import torch")
        yield pool


@pytest.mark.parametrize(("source", "lab", "check"), list(exercises_on_ranks()))
def test_a_hole_on_the_ranks_is_not_solved_yet(pool: labkit.WorkerPool, source: str, lab: str, check: str) -> None:
    function = getattr(importlib.import_module(f"labkit.course.labs.{lab}"), check)
    given = {"timeout_s": 20.0, "num_nodes": 1}
    needed = [name for name, parameter in inspect.signature(function).parameters.items() if parameter.default is parameter.empty]
    pool.run_cell(re.sub(r"\A%%spmd.*\n", "", with_holes(source)))
    with pytest.raises(ExerciseError, match=r"\w+ is not solved yet(.|\n)*%%spmd"):
        function(pool, **{name: given[name] for name in needed if name != "pool"})
