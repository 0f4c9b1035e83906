"""``labkit run`` in a folder that others can write to: the kernel imports nothing from it, but the notebook finds its modules."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from labkit.course.running.runner import run_notebooks
from tests.conftest import MakeNotebook
from tests.process.shadows import plant

pytestmark = pytest.mark.process


def text_of(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells if cell.cell_type == "code" for output in cell.outputs)


def test_h1_a_run_imports_no_neighbours_module_from_the_notebooks_folder(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    notebook = make_notebook("one", "x = 1", "print(x)")
    mark = tmp_path / "out" / "ran"
    mark.parent.mkdir()
    plant(notebook.parent, mark)
    (result,) = run_notebooks([notebook], tmp_path / "out", timeout_s=60)
    assert not mark.exists(), mark.read_text()
    assert result.passed, result.error


def test_a_notebooks_own_modules_are_found_where_every_kernel_finds_them(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("value = 'helped'")
    notebook = make_notebook(
        "one", "import helper, os, sys\nprint(helper.value, sys.path, os.getcwd(), __name__, len(sys.argv) > 2)"
    )
    (result,) = run_notebooks([notebook], tmp_path / "out", timeout_s=60)
    assert result.passed, result.error
    alone = nbformat.read(notebook, as_version=4)
    NotebookClient(alone, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    usual = "".join(output.text for cell in alone.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "helped" in usual
    assert text_of(result.executed) == usual
