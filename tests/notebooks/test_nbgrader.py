"""Labs as assignments of nbgrader: each exercise becomes a hole, the check after it gives points, nothing else changes."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner, Result
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.cli import main
from labkit.course.handouts.nbgrader import AssignmentError, assignment_of
from tests.notebooks.conventions import NOTEBOOKS

NOBODY = 65534


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


def _lab(path: Path) -> Path:
    cells = [
        new_markdown_cell("### Exercise 1: a ★"),
        new_code_cell("### BEGIN SOLUTION\na = 1\n### END SOLUTION"),
        new_code_cell("check()", metadata={"tags": ["check"]}),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=cells), path)
    return path


def _nbgrader(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["nbgrader", *map(str, arguments)])


@pytest.mark.parametrize("kind", ["input", "hard link", "link", "another's", "changed"])
def test_s5_an_assignment_is_written_over_nothing_but_an_earlier_one(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "source" / "a" / "a.ipynb"
    lab = _lab(target if kind == "input" else tmp_path / "a.ipynb")
    target.parent.mkdir(parents=True, exist_ok=True)
    if kind == "hard link":
        target.hardlink_to(lab)
    elif kind == "link":
        target.symlink_to(lab)
    elif kind == "another's":
        _lab(target)
    elif kind == "changed":
        for _ in range(2):
            assert _nbgrader(lab, "-o", tmp_path).exit_code == 0
        mine = nbformat.read(target, as_version=4)
        mine.cells.append(new_markdown_cell("my notes"))
        nbformat.write(mine, target)
    before = target.read_bytes()
    told = _nbgrader(lab, "-o", tmp_path)
    assert told.exit_code == 1
    assert target.read_bytes() == before == (lab.read_bytes() if kind in ("input", "hard link", "link") else before)


@pytest.mark.parametrize("kind", ["linked name", "linked source", "another's name", "another's source", "shared folder"])
def test_s5_an_assignment_is_written_into_no_folder_that_is_a_link_or_another_user_s(tmp_path: Path, kind: str) -> None:
    lab, private, out = _lab(tmp_path / "a.ipynb"), tmp_path / "private", tmp_path / "out"
    private.mkdir()
    place = out / "source" if kind.endswith("source") else out / "source" / "a"
    place.parent.mkdir(parents=True)
    if kind.startswith("linked"):
        place.symlink_to(private)
    elif os.geteuid() != 0:
        pytest.skip("only root may give a folder to another user")
    elif kind == "shared folder":
        os.chown(out, NOBODY, NOBODY)
    else:
        place.mkdir()
        os.chown(place, NOBODY, NOBODY)
    told = _nbgrader(lab, "-o", out)
    if kind == "shared folder":
        assert told.exit_code == 0, told.output
        return
    assert (told.exit_code, len(told.output.splitlines())) == (1, 1), told.output
    assert f"{place} " in told.output
    assert "place." in told.output
    assert [*private.iterdir(), *out.rglob("*.ipynb")] == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"cells": 3}', '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}']
)
def test_s12_what_is_no_notebook_is_refused_in_a_line_and_no_assignment_is_left(tmp_path: Path, content: str) -> None:
    bad = tmp_path / "bad.ipynb"
    bad.write_text(content)
    told = _nbgrader(_lab(tmp_path / "good.ipynb"), bad, "-o", tmp_path / "out")
    assert (told.exit_code, len(told.output.splitlines())) == (1, 1), told.output
    assert "bad.ipynb is not a valid notebook" in told.output
    assert not (tmp_path / "out").exists()


def test_s12_a_notebook_of_an_older_format_whose_cells_have_no_ids_becomes_an_assignment(tmp_path: Path) -> None:
    lab = _lab(tmp_path / "old.ipynb")
    old = nbformat.read(lab, as_version=4)
    old.nbformat_minor = 4
    for cell in old.cells:
        del cell["id"]
    nbformat.write(old, lab)
    told = _nbgrader(lab, "-o", tmp_path)
    assert told.exit_code == 0, told.output
    made = nbformat.read(tmp_path / "source" / "old" / "old.ipynb", as_version=4)
    assert [cell.metadata.nbgrader.grade_id for cell in made.cells[1:]] == ["exercise-cell-2", "check-cell-3"]
