"""The conventions of all lab notebooks. Each check takes a notebook and its path and returns one line per violation."""

from __future__ import annotations

import ast
import re
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from tests import scripts

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_LINES = 25
MAX_MEDIAN_LINES = 8
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"

Check = Callable[[NotebookNode, Path], Iterator[str]]

_strip = scripts.load("strip")
_DOWNLOADS = re.compile(
    r"https?://|ftp://|\burllib\b|\brequests\b|\bhttpx\b|\btorch\.hub\b|load_state_dict_from_url|\bwget\b|\bcurl\b|(%|!)\s*(pip|conda)\b"
)


def read(path: Path) -> NotebookNode:
    """The notebook exactly as it is in the file, without the repairs that nbformat makes to an invalid one."""
    return nbformat.from_dict(nbformat.reader.reads(path.read_text(encoding="utf-8")))


def is_valid(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """nbformat 4.5, every cell with an id of its own. nbformat only warns of missing and duplicate ids."""
    if (notebook.nbformat, notebook.nbformat_minor) != (4, 5):
        yield f"format {notebook.nbformat}.{notebook.nbformat_minor} instead of 4.5"
    ids = [cell.get("id") for cell in notebook.cells]
    yield from (f"cell {index} has no id" for index, name in enumerate(ids) if not name)
    yield from (f"{ids.count(name)} cells have the id {name!r}" for name in sorted(set(filter(None, ids))) if ids.count(name) > 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            nbformat.validate(notebook)
        except (nbformat.ValidationError, Warning) as problem:
            yield f"not a valid notebook: {str(problem).splitlines()[0]}"


def is_stripped(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """Committed without outputs and traces of a run, in the layout in which JupyterLab saves."""
    for index, cell in _code(notebook):
        if cell.get("outputs"):
            yield f"{_name(index, cell)} has outputs: run `make strip`"
        if cell.get("execution_count") is not None:
            yield f"{_name(index, cell)} has an execution count: run `make strip`"
    for index, cell in enumerate(notebook.cells):
        if extra := sorted(set(cell.metadata) - _strip.KEPT_CELL_METADATA):
            yield f"{_name(index, cell)} has the metadata {', '.join(extra)}: run `make strip`"
    if extra := sorted(set(notebook.metadata) - _strip.KEPT_NOTEBOOK_METADATA):
        yield f"the notebook has the metadata {', '.join(extra)}: run `make strip`"


def has_our_layout(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """The file is byte for byte what ``make strip`` writes, so that saving in JupyterLab changes no line by itself."""
    text = path.read_text(encoding="utf-8")
    if text != _strip.stripped(text):
        yield "the file is not laid out as JupyterLab saves it: run `make strip`"


def names_the_kernel(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """The kernel every environment has."""
    name = notebook.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        yield f"kernelspec is {name!r} instead of 'python3'"


def has_one_title(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """One H1, in the first cell, with the file's number: ``# 03 Title``."""
    titles = [
        (index, line) for index, cell in _markdown(notebook) for line in _prose(cell.source).splitlines() if line.startswith("# ")
    ]
    if len(titles) != 1:
        yield f"{len(titles)} headings of the first level instead of one: {[line for _, line in titles]}"
    number = path.stem.split("_")[0]
    if titles and (titles[0][0] != 0 or not titles[0][1].startswith(f"# {number} ")):
        yield f"the first cell does not open with '# {number} Title' but cell {titles[0][0]} has {titles[0][1]!r}"


def has_plain_parameters(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """One ``parameters`` cell, the first code cell: a literal a line, each with a comment, ``world_size`` among them."""
    cells = [(index, cell) for index, cell in _code(notebook) if "parameters" in _tags(cell)]
    if len(cells) != 1:
        yield f"{len(cells)} cells tagged 'parameters' instead of one"
        return
    index, cell = cells[0]
    if index != next(_code(notebook))[0]:
        yield f"{_name(index, cell)} with the parameters is not the first code cell"
    names = []
    for statement in ast.parse(cell.source).body:
        text = ast.unparse(statement)
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not isinstance(statement.targets[0], ast.Name):
            yield f"{_name(index, cell)}: `{text}` is not one name = one literal, which is all that papermill understands"
            continue
        names.append(statement.targets[0].id)
        try:
            ast.literal_eval(statement.value)
        except ValueError:
            yield f"{_name(index, cell)}: the value of `{text}` is no literal"
        if "#" not in cell.source.splitlines()[statement.end_lineno - 1][statement.end_col_offset :]:
            yield f"{_name(index, cell)}: `{text}` has no comment that says what it is, with its unit"
    if "world_size" not in names:
        yield f"{_name(index, cell)} sets no world_size"


def uses_its_parameters(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """Every parameter occurs in another cell: a parameter without effect would mislead."""
    cells = [cell for _, cell in _code(notebook)]
    rest = "\n".join(cell.source for cell in cells if "parameters" not in _tags(cell))
    for cell in cells:
        for name in re.findall(r"^(\w+) =", cell.source, re.MULTILINE) if "parameters" in _tags(cell) else []:
            if not re.search(rf"\b{name}\b", rest):
                yield f"the parameter {name} is used nowhere"


def has_setup_cell(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """The code cell after the parameters loads labkit."""
    code = list(_code(notebook))
    if len(code) < 2 or "%load_ext labkit" not in code[1][1].source.splitlines():
        yield "the second code cell has no line `%load_ext labkit`"


def has_short_cells(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """A cell fits on the screen beside its output."""
    lengths = [(index, cell, len(cell.source.splitlines())) for index, cell in _code(notebook)]
    yield from (
        f"{_name(index, cell)} has {length} lines, more than {MAX_LINES}" for index, cell, length in lengths if length > MAX_LINES
    )
    if lengths and (median := statistics.median(length for _, _, length in lengths)) > MAX_MEDIAN_LINES:
        yield f"the median code cell has {median:g} lines, more than {MAX_MEDIAN_LINES}"


def has_code_that_compiles(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """Every code cell is Python once its magics are taken out; ruff does not look into ``%%spmd`` cells."""
    for index, cell in _code(notebook):
        first, _, rest = cell.source.partition("\n")
        source = TransformerManager().transform_cell(rest if first.startswith("%%spmd") else cell.source)
        try:
            compile(source, path.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        except SyntaxError as error:
            yield f"{_name(index, cell)} does not compile: {error.msg} at line {error.lineno}"


def catches_its_errors(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """No cell has the tag ``raises-exception``: papermill stops at it, and the cell passes even if nothing is raised."""
    for index, cell in enumerate(notebook.cells):
        if "raises-exception" in _tags(cell):
            yield f"{_name(index, cell)} is tagged raises-exception: use `with labkit.expect_error(...)`"


def closes_its_pool(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """The last code cell ends the ranks."""
    code = list(_code(notebook))
    if not code or not re.search(r"^pool\.close\(\)", code[-1][1].source, flags=re.MULTILINE):
        yield "the last code cell has no line `pool.close()`"


def has_balanced_solutions(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """Each solution begins and ends within its cell, so that the students' copy loses all of it and nothing else."""
    for index, cell in enumerate(notebook.cells):
        is_open = False
        for line in cell.source.splitlines():
            marker = line.strip()
            if "BEGIN SOLUTION" in marker or "END SOLUTION" in marker:
                expected = END if is_open else BEGIN
                if marker != expected or cell.cell_type != "code":
                    yield f"{_name(index, cell)}: `{marker}` where a code cell should have `{expected}`"
                is_open = "BEGIN" in marker
        if is_open:
            yield f"{_name(index, cell)}: a solution has no `{END}`"


def says_what_to_notice(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """Text comments on the output that cells produce."""
    if not any("**What to notice" in cell.source for _, cell in _markdown(notebook)):
        yield "no markdown cell says **What to notice**"


def has_links_that_lead_somewhere(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """Relative links and anchors exist, images have an alternative text and are no downloads."""
    anchors = {
        re.sub(r"\s+", "-", line.lstrip("#").strip())
        for _, cell in _markdown(notebook)
        for line in cell.source.splitlines()
        if line.startswith("#")
    }
    for index, cell in _markdown(notebook):
        for image, text, target in re.findall(r"(!?)\[([^\]]*)\]\(\s*<?([^)\s>]+)", _prose(cell.source)):
            if image and not text.strip():
                yield f"{_name(index, cell)}: the image {target} has no alternative text"
            if image and "://" in target:
                yield f"{_name(index, cell)}: the image {target} would be fetched from the network"
            yield from (f"{_name(index, cell)}: {problem}" for problem in _dead_link(target, path.parent, anchors))


def _dead_link(target: str, folder: Path, anchors: set[str]) -> Iterator[str]:
    if re.match(r"[a-z]+:", target):
        return
    file, _, anchor = unquote(target).partition("#")
    if file and not (folder / file).exists():
        yield f"the link to {file} leads nowhere"
    if not file and anchor not in anchors:
        yield f"no heading has the anchor #{anchor}"


def stays_off_the_network(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """Nothing is fetched or installed while the notebook runs."""
    for index, cell in _code(notebook):
        for line in cell.source.splitlines():
            if found := _DOWNLOADS.search(line.partition("# ")[0]):
                yield f"{_name(index, cell)}: `{line.strip()}` reaches for the network ({found.group().strip()})"


def folds_markdown(notebook: NotebookNode, path: Path) -> Iterator[str]:
    """Folded text has a blank line before and after; without them a page shows its Markdown signs as they are."""
    for index, cell in _markdown(notebook):
        if re.search(r"</summary>(?!\n\n)|(?<!\n\n)</details>", cell.source):
            yield f"{_name(index, cell)} folds text that is not read as Markdown"


CHECKS: tuple[Check, ...] = (
    is_valid,
    is_stripped,
    has_our_layout,
    names_the_kernel,
    has_one_title,
    has_plain_parameters,
    uses_its_parameters,
    has_setup_cell,
    has_short_cells,
    has_code_that_compiles,
    catches_its_errors,
    closes_its_pool,
    has_balanced_solutions,
    says_what_to_notice,
    folds_markdown,
    has_links_that_lead_somewhere,
    stays_off_the_network,
)


def _code(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    return ((index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code")


def _markdown(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    return ((index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "markdown")


def _tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _prose(source: str) -> str:
    """Markdown without its code, where `#` and `[...](...)` mean something else."""
    without_blocks = re.sub(r"^(```|~~~).*?^\1", "", source, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "``", without_blocks)


def _name(index: int, cell: NotebookNode) -> str:
    return f"cell {index} (id {cell.get('id')})"
