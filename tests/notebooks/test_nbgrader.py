"""Labs as assignments of nbgrader: each exercise is a hole to fill, the check after it gives its points, nothing else changes."""

from __future__ import annotations

import copy
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.cli import main
from labkit.course.nbgrader import AssignmentError, assignment_of
from tests.notebooks.conventions import NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_lab_asks_and_grades_in_turn_and_gives_a_point_per_star(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    before = copy.deepcopy(notebook)
    assignment = assignment_of(notebook)
    nbformat.validate(assignment)
    assert notebook == before
    assert [cell.source for cell in assignment.cells] == [cell.source for cell in notebook.cells]
    marked = [cell.metadata.nbgrader for cell in assignment.cells if "nbgrader" in cell.metadata]
    assert len({mark.grade_id for mark in marked}) == len(marked)
    solutions = [mark for mark in marked if mark.solution]
    grades = [mark for mark in marked if mark.grade]
    assert len(solutions) + len(grades) == len(marked)
    assert [mark.solution for mark in marked[::2]] == [True] * len(solutions)
    assert len(grades) == len(solutions)
    assert all(mark.locked and not mark.solution for mark in grades)
    stars = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown").count("★")
    assert sum(mark.points for mark in grades) == stars


def test_a_notebook_without_exercises_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssignmentError, match="0 exercises and 1 checks"):
        assignment_of(new_notebook(cells=[new_markdown_cell("# 1"), new_code_cell("1", metadata={"tags": ["check"]})]))
    path = tmp_path / "empty.ipynb"
    nbformat.write(new_notebook(), path)
    result = CliRunner().invoke(main, ["nbgrader", str(path), "-o", str(tmp_path / "course")])
    assert result.exit_code == 1
    assert "an assignment needs both" in result.output


def test_the_command_lays_them_out_as_a_course(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["nbgrader", *map(str, NOTEBOOKS[:2]), "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ipynb"))
    assert made == [f"source/{path.stem}/{path.name}" for path in NOTEBOOKS[:2]]
