"""Each lab's cells also run under plain torchrun: as one script they show the same as the notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labkit.course.script import NOTEBOOK_ONLY, write_script
from tests.matrix import matrix
from tests.notebooks.conftest import TIMEOUT_S, Execute
from tests.notebooks.conventions import NOTEBOOKS
from tests.notebooks.script_output import Shown, of_notebook, of_script, run_script, without_numbers

WORLD_SIZE = 2
# Cells whose output has to differ, with the reason.
DIFFERENT = {
    "L0-02": "the pool itself",
    "L0-04": "process ids: in the script rank 0 is the notebook's own process as well",
    "L0-54": "what restart says: in the script there is nothing to restart",
    "L2-57": "plans that are chosen by measured times",
    "L3-32": "a table as wide as its page",
    "L4-15": "times of a clock",
    "L7-21": "bytes on sockets, of which some are headers",
}
# Notebooks that measure memory and time all the way: their words are compared, their numbers are not.
MEASURING = ("02",)


def left_out(path: Path) -> set[str]:
    """Cells that teach a failure, or only make sense in the notebook."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return {
        cell.id
        for cell in cells
        if (cell.source.startswith("%%spmd") and "--expect" in cell.source.partition("\n")[0])
        or NOTEBOOK_ONLY in cell.metadata.get("tags", ())
    }


def differing(script: Shown, notebook: Shown, *, numbers: bool = True) -> dict[str, tuple[list[str], list[str]]]:
    """The output of the script and of the notebook for each cell in which they differ."""
    form = list if numbers else without_numbers
    return {
        name: (shown, notebook.get(name, []))
        for name, shown in script.items()
        if name not in DIFFERENT and form(shown) != form(notebook.get(name, []))
    }


@pytest.mark.process
@pytest.mark.timeout(3 * TIMEOUT_S + 100)
@pytest.mark.parametrize("path", matrix(*NOTEBOOKS), ids=lambda path: path.stem)
def test_a_notebook_s_script_shows_under_torchrun_what_the_notebook_shows(path: Path, tmp_path: Path, execute: Execute) -> None:
    script = tmp_path / f"{path.stem}.py"
    script.write_text(write_script(path))
    returncode, stdout, errors = run_script(script, path.parent, world_size=WORLD_SIZE, timeout_s=TIMEOUT_S)
    assert returncode == 0, errors
    result = execute(path, WORLD_SIZE)
    assert result.passed, result.error
    by_script, by_notebook = of_script(stdout), of_notebook(result.executed)
    code = {cell.id for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"}
    assert by_script.keys() == code - left_out(path)
    found = differing(by_script, by_notebook, numbers=not path.stem.startswith(MEASURING))
    assert not found, found
    shown = sum(map(len, by_script.values()))
    assert shown > 30, "almost nothing was compared"


def test_a_script_without_torchrun_says_how_to_start_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(write_script(NOTEBOOKS[0]))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "MASTER_ADDR")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 1
    assert "torchrun --nproc-per-node 2" in done.stderr


def test_a_script_with_arguments_says_where_its_parameters_are(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(write_script(NOTEBOOKS[0]))
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    call = [sys.executable, str(script), "--world_size", "3"]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 1
    assert "was given --world_size 3" in done.stderr
    assert "labkit script NOTEBOOK -p NAME VALUE" in done.stderr


def test_a_difference_in_one_number_is_found() -> None:
    notebook = {"a": ["loss 4.132137"], "L0-02": ["x"]}
    assert differing({"a": ["loss 4.132137"], "L0-02": ["y"]}, notebook) == {}
    assert list(differing({"a": ["loss 4.132138"]}, notebook)) == ["a"]
    assert list(differing({"b": ["new"]}, notebook)) == ["b"]
    assert differing({"a": ["loss  5"]}, notebook, numbers=False) == {}
    assert list(differing({"a": ["gain 4.132137"]}, notebook, numbers=False)) == ["a"]
