"""The notebook that ``labkit new`` writes is a complete lab: it runs, and every command accepts it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner

from labkit.cli import main
from labkit.course.running.runner import run_notebooks
from tests.matrix import matrix
from tests.notebooks import conventions

WRONG = {
    "return total / world_size": ("return total", "rank 0 has 1\nTarget: 0.5 on every rank\nHint: this is the sum"),
    "total = number.clone()": ("total = number", "rank 0's number is 1 now\nTarget: 0\nHint: all_reduce writes"),
    "    dist.all_reduce(total)\n": ("", "rank 0 has 0\nTarget: 0.5 on every rank"),
}


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    path = tmp_path / "08_my_lab.ipynb"
    made = CliRunner().invoke(main, ["new", str(path)])
    assert made.exit_code == 0, made.output
    return path


@pytest.mark.process
def test_a_new_lab_passes(lab: Path, tmp_path: Path) -> None:
    (result,) = run_notebooks([lab], tmp_path / "out")
    assert result.passed, result.error


@pytest.mark.process
@pytest.mark.parametrize("line", matrix(*WRONG))
def test_a_new_lab_s_check_refuses_wrong_answers(lab: Path, tmp_path: Path, line: str) -> None:
    wrong, message = WRONG[line]
    lab.write_text(lab.read_text().replace(repr(line)[1:-1], repr(wrong)[1:-1]))
    (result,) = run_notebooks([lab], tmp_path / "out")
    assert message in result.error, f"{wrong}: {result.error}"


def test_a_new_lab_keeps_the_conventions_and_bears_its_file_s_name(lab: Path) -> None:
    notebook = conventions.read(lab)
    assert notebook.cells[0].source.startswith("# 08 my lab\n")
    assert [line for check in conventions.CHECKS for line in check(notebook, lab)] == []


def test_script_and_nbgrader_take_a_new_lab(lab: Path, tmp_path: Path) -> None:
    for arguments in (["script", str(lab), "-o", str(tmp_path / "lab.py")], ["nbgrader", str(lab), "-o", str(tmp_path / "graded")]):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
    assert "mean_over_ranks" in (tmp_path / "lab.py").read_text()
    graded = nbformat.read(tmp_path / "graded/source/08_my_lab/08_my_lab.ipynb", as_version=4)
    assert sum(cell.metadata.get("nbgrader", {}).get("points", 0) for cell in graded.cells) == 1


def test_a_file_that_exists_is_not_replaced(lab: Path, tmp_path: Path) -> None:
    lab.write_text("mine")
    refused = CliRunner().invoke(main, ["new", str(lab)])
    assert refused.exit_code == 1
    assert "exists already" in refused.output
    assert lab.read_text() == "mine"
    assert "has to end in .ipynb" in CliRunner().invoke(main, ["new", str(tmp_path / "lab.txt")]).output
