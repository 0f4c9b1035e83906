"""A learner's own copies of the labs: unsolved, never overwritten, and fit for "Run all cells" from the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from click.testing import CliRunner, Result
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.cli import main
from labkit.course.handouts.copies.solutions import Secrets
from labkit.course.handouts.copies.student import student_copy
from labkit.course.learner import copies, progress
from labkit.course.learner.cli import PRIVATE
from labkit.course.learner.copies import LabNotFoundError, chosen, student_labs, write_copies
from tests.matrix import matrix
from tests.notebooks.conventions import NOTEBOOKS, ROOT

MAY_FAIL = {"exercise", "check", "uses-exercise"}


def lab(text: str) -> NotebookNode:
    cells = [
        new_markdown_cell("# 00 A lab\n\nAfter this lab you can count.\n\n| | |\n|---|---|\n| **Needs** | a CPU |", id="title"),
        new_markdown_cell("### Exercise 1: count ★", id="ask"),
        new_code_cell(text, id="code", metadata={"tags": ["exercise"]}),
        new_code_cell("check()", id="check", metadata={"tags": ["check"]}),
    ]
    return new_notebook(cells=cells)


def states(folder: Path, text: str) -> list[tuple[str, str]]:
    return [(copy.path.name, copy.state) for copy in write_copies({"00_lab": lab(text)}, folder)]


def edited(path: Path, **changes: Any) -> None:
    """Save a notebook as JupyterLab does after a change of its second code cell: the notebook's metadata stay."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[3].update(changes)
    nbformat.write(notebook, path)


def test_a_copy_is_made_kept_and_renewed_while_nobody_has_changed_it(tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert states(work, "one") == [("00_lab.ipynb", "made")]
    assert states(work, "one") == [("00_lab.ipynb", "kept")]
    assert states(work, "two") == [("00_lab.ipynb", "renewed")]
    assert nbformat.read(work / "00_lab.ipynb", as_version=4).cells[2].source == "two"


@pytest.mark.parametrize("changes", [{"source": "mine"}, {"outputs": [new_output("stream", text="Solved")], "execution_count": 3}])
def test_a_copy_that_was_changed_or_run_stays_and_a_newer_lab_goes_beside_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    states(tmp_path, "one")
    edited(tmp_path / "00_lab.ipynb", **changes)
    mine = (tmp_path / "00_lab.ipynb").read_bytes()
    assert states(tmp_path, "one") == [("00_lab.ipynb", "kept")]
    assert states(tmp_path, "two") == [("00_lab.v2.ipynb", "beside")]
    assert states(tmp_path, "two") == [("00_lab.v2.ipynb", "kept")]
    assert states(tmp_path, "three") == [("00_lab.v2.ipynb", "renewed")]
    edited(tmp_path / "00_lab.v2.ipynb", **changes)
    assert states(tmp_path, "four") == [("00_lab.v3.ipynb", "beside")]
    assert (tmp_path / "00_lab.ipynb").read_bytes() == mine


@pytest.mark.parametrize(
    "make", [lambda path: path.write_text("my notes"), lambda path: path.mkdir(), lambda path: path.symlink_to("/")]
)
def test_what_is_no_copy_of_labkits_stays_and_the_lab_goes_beside_it(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "00_lab.ipynb")
    before = os.lstat(tmp_path / "00_lab.ipynb")
    assert states(tmp_path, "one") == [("00_lab.v2.ipynb", "apart")]
    assert os.lstat(tmp_path / "00_lab.ipynb") == before


def test_a_lab_is_chosen_by_the_beginning_of_its_name() -> None:
    labs = {"00_start": lab("a"), "03_fsdp": lab("b"), "03_more": lab("c")}
    assert list(chosen(labs, ("00",))) == ["00_start"]
    assert list(chosen(labs, ("03_f", "00_start.ipynb"))) == ["03_fsdp", "00_start"]
    assert chosen(labs, ()) == labs
    with pytest.raises(LabNotFoundError, match=r"2 labs begin with '03'"):
        chosen(labs, ("03",))
    with pytest.raises(LabNotFoundError, match=r"no lab begins with '9'. The labs are 00_start, "):
        chosen(labs, ("9",))


def test_the_copies_of_all_labs_hold_no_solution_and_no_output() -> None:
    labs = student_labs()
    assert sorted(labs) == sorted(path.stem for path in NOTEBOOKS)
    secrets = Secrets(nbformat.read(path, as_version=4) for path in NOTEBOOKS)
    for notebook in labs.values():
        assert not secrets.in_notebook(notebook)
        assert not any(cell.get("outputs") for cell in notebook.cells)


def test_an_exercise_is_open_tried_or_solved_as_the_saved_output_of_its_check_says(tmp_path: Path) -> None:
    states(tmp_path, "one")
    assert [exercise.state for exercise in progress(tmp_path).labs[0].exercises] == ["open"]
    failed, unanswered = (new_output("error", ename=f"{name}Error", evalue="", traceback=[]) for name in ("Exercise", "Unsolved"))
    solved = new_output("stream", text="Solved: 3")
    for outputs, state in (([unanswered], "open"), ([failed], "tried"), ([solved], "solved")):
        edited(tmp_path / "00_lab.ipynb", outputs=outputs)
        (found,) = progress(tmp_path).labs
        assert [(exercise.name, exercise.state) for exercise in found.exercises] == [("1: count", state)]
    assert (found.title, found.about, found.needs, found.takes) == ("00 A lab", "count.", "a CPU", "")
    assert "1 of 1" in repr(progress(tmp_path))
    with pytest.raises(LabNotFoundError, match="labkit lab writes them"):
        progress(ROOT / "tests")


def test_a_copy_that_cannot_be_read_is_named_and_not_left_out_of_the_count_in_silence(tmp_path: Path) -> None:
    states(tmp_path, "one")
    (tmp_path / "01_half.ipynb").write_text((tmp_path / "00_lab.ipynb").read_text()[:200])
    found = progress(tmp_path)
    assert len(found.labs) == 1
    for text in (repr(found), found._repr_markdown_()):
        assert "01_half.ipynb cannot be read, and is not counted" in text


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collect the command lines that would have become JupyterLab's."""
    lines: list[list[str]] = []

    def execv(path: str, line: list[str]) -> None:
        lines.append(line)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    return lines


def test_the_command_writes_the_labs_and_a_page_that_leads_to_them_and_opens_it(tmp_path: Path, started: list[list[str]]) -> None:
    work = tmp_path / "work"
    result = invoke("lab", "--into", str(work), "--ip", "0.0.0.0", "--no-browser")
    assert result.output == f"{work}: {len(NOTEBOOKS)} new labs\n"
    (line,) = started
    assert [PRIVATE, f"--ServerApp.root_dir={work}", "--LabApp.default_url=/lab/tree/start.ipynb"] == line[4:7]
    assert line[-3:] == ["--ip", "0.0.0.0", "--no-browser"]
    page = nbformat.read(work / "start.ipynb", as_version=4)
    shown = page.cells[1].outputs[0].data["text/markdown"]
    assert all(f"]({path.name})" in shown for path in NOTEBOOKS)
    edited(work / "00_start_here.ipynb", source="mine")
    assert invoke("lab", "--into", str(work)).output == f"{work}: {len(NOTEBOOKS)} labs as you left them\n"
    assert invoke("lab", "06", "--into", str(work)).exit_code == 0
    assert started[-1][6] == "--LabApp.default_url=/lab/tree/06_checkpoint_forensics.ipynb"


def test_progress_before_the_first_copy_says_what_writes_them(tmp_path: Path) -> None:
    result = invoke("progress", str(tmp_path / "work"))
    assert result.exit_code == 1
    assert "labkit lab writes them" in result.output


def test_a_start_page_that_the_learner_has_changed_stays(tmp_path: Path) -> None:
    assert invoke("lab", "00", "--into", str(tmp_path), "--no-open").exit_code == 0
    page = nbformat.read(tmp_path / "start.ipynb", as_version=4)
    page.cells[0].source = "my plan"
    nbformat.write(page, tmp_path / "start.ipynb")
    assert invoke("lab", "01", "--into", str(tmp_path), "--no-open").exit_code == 0
    assert nbformat.read(tmp_path / "start.ipynb", as_version=4).cells[0].source == "my plan"


def test_the_labs_with_solutions_open_where_they_are_and_only_in_a_checkout(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("lab", "--solved")
    assert f"--ServerApp.root_dir={ROOT}" in started[0]
    assert "--LabApp.default_url=/lab/tree/notebooks" in started[0]
    assert "choose one" in invoke("lab", "--solved", "--no-open").output
    assert len(started) == 1
    monkeypatch.setattr(copies, "SOLVED", ROOT / "tests")
    result = invoke("lab", "--solved")
    assert result.exit_code == 1
    assert "in labkit's repository only" in result.output


def test_a_built_package_carries_the_labs_without_solutions(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    carried = tmp_path / copies.CARRIED.relative_to(ROOT)
    assert sorted(path.name for path in carried.iterdir()) == sorted(path.name for path in NOTEBOOKS)
    for path in carried.iterdir():
        assert "BEGIN SOLUTION" not in path.read_text()
        assert json.loads(path.read_text())["cells"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stem", matrix("06_checkpoint_forensics", *(path.stem for path in NOTEBOOKS if path.stem[:2] != "06")))
def test_run_all_on_an_untouched_copy_goes_to_the_end_and_each_open_exercise_says_so_in_one_line(tmp_path: Path, stem: str) -> None:
    notebook = student_labs()[stem]
    first = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    first.source += "\nworld_size = 2\ndevice = 'cpu'"
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    for cell in notebook.cells:
        failed = [output for output in cell.get("outputs", ()) if output.output_type == "error"]
        assert not failed or MAY_FAIL & set(cell.metadata.tags), cell.source
        for output in failed:
            (line,) = "\n".join(output.traceback).splitlines()
            assert "not solved yet" in line or "not set yet" in line or "there is no" in line, line
    assert notebook.cells[-1].execution_count


def test_only_what_an_exercise_may_leave_undone_may_fail() -> None:
    notebook = nbformat.read(NOTEBOOKS[1], as_version=4)
    for cell in student_copy(notebook, Secrets([notebook])).cells:
        tags = set(cell.metadata.get("tags", ()))
        assert ("raises-exception" in tags) == bool(tags & MAY_FAIL)
