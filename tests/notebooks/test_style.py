"""The notebooks follow the conventions, and the checks of the conventions can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nbformat.v4
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests import scripts
from tests.notebooks import conventions

PARAMETERS = "world_size = 4  # ranks"


@pytest.mark.parametrize("check", conventions.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("path", conventions.NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_the_convention(path: Path, check: conventions.Check) -> None:
    violations = list(check(conventions.read(path), path))
    assert not violations, f"{path.name}, {check.__name__} ({check.__doc__}):\n" + "\n".join(f"  {line}" for line in violations)


@pytest.fixture
def notebook() -> NotebookNode:
    cells = [
        new_markdown_cell("# 07 Sample\n\nSee [itself](07_sample.ipynb) and [below](#Who-waits?), not `x[0](y)`."),
        new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        new_code_cell("%load_ext labkit\nimport labkit\n\npool = labkit.WorkerPool(world_size)"),
        new_markdown_cell("## Who waits?\n\n```python\n# no heading\n```"),
        new_code_cell("%%spmd --ranks 0\n### BEGIN SOLUTION\nawait_me = !ls\n### END SOLUTION"),
        new_markdown_cell("**What to notice.** It is short."),
        new_code_cell("pool.close()"),
    ]
    metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return new_notebook(cells=cells, metadata=metadata)


def test_stripping_a_notebook_that_has_run_leaves_what_its_author_wrote(notebook: NotebookNode, tmp_path: Path) -> None:
    written = [(cell.id, cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells]
    for breakage in (_output, _count, _cell_trace, _notebook_trace, _python_version, _other_kernel):
        breakage(notebook)
    path = tmp_path / "07_sample.ipynb"
    path.write_text(scripts.load("strip").stripped(nbformat.v4.writes(notebook)))
    stripped = conventions.read(path)
    assert [(cell.id, cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in stripped.cells] == written
    assert [line for check in conventions.CHECKS for line in check(stripped, path)] == []


def _violations(check: conventions.Check, notebook: NotebookNode, folder: Path) -> list[str]:
    path = folder / "07_sample.ipynb"
    path.write_text(nbformat.v4.writes(notebook) + "\n")
    return list(check(conventions.read(path), path))


@pytest.mark.parametrize("check", conventions.CHECKS, ids=lambda check: check.__name__)
def test_a_notebook_that_keeps_the_conventions_passes(check: conventions.Check, notebook: NotebookNode, tmp_path: Path) -> None:
    assert _violations(check, notebook, tmp_path) == []


def _source(index: int, text: str) -> Callable[[NotebookNode], None]:
    def breakage(notebook: NotebookNode) -> None:
        notebook.cells[index].source = text

    return breakage


def _duplicate_id(notebook: NotebookNode) -> None:
    notebook.cells[2]["id"] = notebook.cells[1]["id"] = "twice"


def _missing_id(notebook: NotebookNode) -> None:
    del notebook.cells[3]["id"]


def _old_format(notebook: NotebookNode) -> None:
    notebook.nbformat_minor = 4


def _output(notebook: NotebookNode) -> None:
    notebook.cells[6].outputs = [new_output("stream", text="hello")]


def _count(notebook: NotebookNode) -> None:
    notebook.cells[6].execution_count = 3


def _cell_trace(notebook: NotebookNode) -> None:
    notebook.cells[6].metadata["papermill"] = {"duration": 1.0}


def _notebook_trace(notebook: NotebookNode) -> None:
    notebook.metadata["widgets"] = {}


def _python_version(notebook: NotebookNode) -> None:
    notebook.metadata["language_info"]["version"] = "3.12.1"


def _other_kernel(notebook: NotebookNode) -> None:
    notebook.metadata["kernelspec"]["name"] = "my-env"


def _no_parameters(notebook: NotebookNode) -> None:
    notebook.cells[1].metadata = {}


def _late_parameters(notebook: NotebookNode) -> None:
    notebook.cells.insert(1, new_code_cell("1 + 1"))


def _raises(notebook: NotebookNode) -> None:
    notebook.cells[4].metadata["tags"] = ["raises-exception"]


def _long_median(notebook: NotebookNode) -> None:
    for cell in notebook.cells[2], notebook.cells[4], notebook.cells[6]:
        cell.source += "\n1" * 9


BREAKAGES: list[tuple[conventions.Check, Callable[[NotebookNode], None], str]] = [
    (conventions.is_valid, _duplicate_id, "2 cells have the id 'twice'"),
    (conventions.is_valid, _missing_id, "cell 3 has no id"),
    (conventions.is_valid, _old_format, "format 4.4 instead of 4.5"),
    (conventions.is_stripped, _output, "has outputs: run `make strip`"),
    (conventions.is_stripped, _count, "has an execution count"),
    (conventions.is_stripped, _cell_trace, "has the metadata papermill"),
    (conventions.is_stripped, _notebook_trace, "has the metadata widgets"),
    (conventions.has_our_layout, _python_version, "run `make strip`"),
    (conventions.names_the_kernel, _other_kernel, "kernelspec is 'my-env'"),
    (conventions.has_one_title, _source(3, "# Another"), "2 headings of the first level"),
    (conventions.has_one_title, _source(0, "Text only"), "0 headings of the first level"),
    (conventions.has_one_title, _source(0, "# 08 Sample"), "'# 07 Title'"),
    (conventions.has_plain_parameters, _no_parameters, "0 cells tagged 'parameters'"),
    (conventions.has_plain_parameters, _late_parameters, "not the first code cell"),
    (conventions.has_plain_parameters, _source(1, "world_size, n = 4, 2  # ranks"), "not one name = one literal"),
    (conventions.has_plain_parameters, _source(1, "world_size = 2 * n  # ranks"), "no literal"),
    (conventions.has_plain_parameters, _source(1, "world_size = 4"), "no comment"),
    (conventions.has_plain_parameters, _source(1, "n = 4  # rows"), "sets no world_size"),
    (
        conventions.uses_its_parameters,
        _source(1, "world_size = 4  # ranks\nsizes = [1, 2]  # rows"),
        "the parameter sizes is used nowhere",
    ),
    (conventions.has_setup_cell, _source(2, "import labkit"), "`%load_ext labkit`"),
    (conventions.has_short_cells, _source(4, "1\n" * 26), "has 26 lines, more than 25"),
    (conventions.has_short_cells, _long_median, "the median code cell has"),
    (conventions.has_code_that_compiles, _source(4, "%%spmd\nx = = 1"), "does not compile"),
    (conventions.catches_its_errors, _raises, "labkit.expect_error"),
    (conventions.closes_its_pool, _source(6, "print('bye')"), "`pool.close()`"),
    (conventions.has_balanced_solutions, _source(4, "### BEGIN SOLUTION\nx = 1"), "has no `### END SOLUTION`"),
    (conventions.has_balanced_solutions, _source(4, "x = 1\n### END SOLUTION"), "should have `### BEGIN SOLUTION`"),
    (conventions.has_balanced_solutions, _source(4, "# BEGIN SOLUTION\n### END SOLUTION"), "`# BEGIN SOLUTION` where"),
    (conventions.has_balanced_solutions, _source(3, "### BEGIN SOLUTION\n### END SOLUTION"), "where a code cell"),
    (conventions.says_what_to_notice, _source(5, "Look at it."), "**What to notice**"),
    (conventions.folds_markdown, _source(5, "<details><summary>Hint</summary>`x`\n\n</details>"), "not read as Markdown"),
    (conventions.folds_markdown, _source(5, "<details><summary>Hint</summary>\n\n`x`</details>"), "not read as Markdown"),
    (conventions.has_links_that_lead_somewhere, _source(3, "[x](missing.ipynb)"), "missing.ipynb leads nowhere"),
    (conventions.has_links_that_lead_somewhere, _source(3, "[x](#Nowhere)"), "no heading has the anchor #Nowhere"),
    (conventions.has_links_that_lead_somewhere, _source(3, "![](07_sample.ipynb)"), "no alternative text"),
    (conventions.has_links_that_lead_somewhere, _source(3, "![x](https://a.org/b.png)"), "would be fetched"),
    (conventions.stays_off_the_network, _source(4, "urlopen('https://a.org')"), "reaches for the network"),
    (conventions.stays_off_the_network, _source(4, "%pip install x"), "reaches for the network"),
]


@pytest.mark.parametrize(("check", "breakage", "message"), BREAKAGES, ids=[message for _, _, message in BREAKAGES])
def test_a_violation_is_found_and_named(
    check: conventions.Check, breakage: Callable[[NotebookNode], None], message: str, notebook: NotebookNode, tmp_path: Path
) -> None:
    breakage(notebook)
    violations = _violations(check, notebook, tmp_path)
    assert any(message in line for line in violations), violations


def test_every_check_has_a_test_that_makes_it_fail() -> None:
    assert {check for check, _, _ in BREAKAGES} == set(conventions.CHECKS)
