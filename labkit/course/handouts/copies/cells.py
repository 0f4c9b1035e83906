"""The parts that the copies for both audiences share: tags, clean metadata, outputs that need no running kernel."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

import labkit
from labkit.course.files import papermill_of

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
_LIBRARY = re.compile(rf"(?:/[^\s:'\"<>]{{0,200}}?/site-packages|{re.escape(str(Path(labkit.__file__).parent.parent))})/")
# Match code in markdown first, because what looks like a link there is not one.
_LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]*`)|(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<address>[^)\s]+)\)", re.MULTILINE | re.DOTALL
)
_ELSEWHERE = re.compile(r"#|[a-z]+:")
_LEFT_OUT = {"injected-parameters"}
_FENCE = re.compile(r"[ \t]*(```|~~~)")
# Match only at the beginning of a paragraph or sentence; elsewhere the words merely mention predictions.
_PREDICTION = re.compile(r"(?:^|\. )\*\*Predict first", re.MULTILINE)


def tags(cell: NotebookNode) -> set[str]:
    """Return the cell's tags."""
    return set(cell.metadata.get("tags", ()))


def is_for_instructor(cell: NotebookNode) -> bool:
    """Return whether a cell is left out for students."""
    return bool(tags(cell) & {"instructor", "solution"})


def title(notebook: NotebookNode) -> str:
    """Return the first-level heading, such as ``00 Start here``."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^# (.+)$", cell.source, flags=re.MULTILINE)):
            return found[1].strip()
    return "Untitled"


def about(notebook: NotebookNode) -> str:
    """Return the first paragraph after the title, without markup; empty if it is a table or a heading."""
    source = str(notebook.cells[0].source) if notebook.cells else ""
    texts = [part.strip() for part in re.sub(r"^# .*$", "", source, flags=re.MULTILINE).split("\n\n") if part.strip()]
    first = texts[0] if texts else ""
    return "" if first.startswith(("|", "#")) else re.sub(r"[*`]|\]\([^)]*\)|\[", "", first)


def num_predictions(prose: str) -> int:
    """Count how often a text asks for a prediction."""
    return len(_PREDICTION.findall(prose))


def paragraphs(source: str) -> Iterator[str]:
    """Yield the paragraphs of markdown. Code, lists and folded text stay in one piece."""
    paragraph: list[str] = []
    in_code, folds = False, 0
    for line in source.split("\n"):
        if _FENCE.match(line):
            in_code = not in_code
        elif not in_code:
            folds += line.count("<details") - line.count("</details>")
        if line.strip() or in_code or folds:
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield "\n".join(paragraph)


def clean_copy(notebook: NotebookNode) -> NotebookNode:
    """Return a copy without traces of the run: no times, widget state, injected cells, or outputs that need a kernel.

    Tags stay, because they say what a cell is: ``exercise``, ``check``, ``fault``.
    """
    cleaned: NotebookNode = nbformat.v4.new_notebook(metadata={"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    for original in notebook.cells:
        if tags(original) & _LEFT_OUT:
            continue
        cell = copy.deepcopy(original)
        cell.metadata = {"tags": sorted(tags(original))} if tags(original) else {}
        if "recap" in tags(original):
            # Its source is the text of the answers, before the numbers are filled in.
            cell.metadata["jupyter"] = {"source_hidden": True}
        if cell.cell_type == "markdown":
            # Without blank lines around it, folded text would be treated as HTML rather than markdown.
            cell.source = re.sub(r"</summary>\s*", "</summary>\n\n", re.sub(r"\s*</details>", "\n\n</details>", cell.source))
        elif cell.cell_type == "code":
            cell.outputs = [_without_paths(output) for output in map(_static, cell.outputs) if output is not None]
        cleaned.cells.append(cell)
    return cleaned


def without_dead_links(notebook: NotebookNode, stems: Iterable[str]) -> NotebookNode:
    """Return a copy in which links to files that are not handed out are plain text.

    Args:
        notebook: A notebook that links to other notebooks by file name.
        stems: File names, without their ending, of the notebooks that are handed out together.
    """
    files = {f"{stem}.ipynb" for stem in stems}

    def living(link: re.Match[str]) -> str:
        address = link["address"] or ""
        leads_on = link["code"] or _ELSEWHERE.match(address) or address.partition("#")[0] in files
        return link[0] if leads_on else link["text"]

    copied = copy.deepcopy(notebook)
    for cell in copied.cells:
        if cell.cell_type == "markdown":
            cell.source = _LINK.sub(living, cell.source)
    return copied


def _static(output: NotebookNode) -> NotebookNode | None:
    """Return the output without a live widget; None if nothing is left."""
    if output.output_type not in ("display_data", "execute_result"):
        return output
    data = {mime: value for mime, value in output.data.items() if mime != WIDGET_VIEW}
    # A display without content, such as a progress bar, was emptied at the end of the run.
    shown = {mime: value for mime, value in data.items() if not isinstance(value, str) or value.strip()}
    if not shown:
        return None
    output.data = data
    return output


def _without_paths(content: Any) -> Any:
    """Shorten the paths of libraries on this machine: ``torch/nn/modules/module.py`` says enough."""
    if isinstance(content, str):
        return _LIBRARY.sub("", content)
    if isinstance(content, list):
        return [_without_paths(part) for part in content]
    if isinstance(content, dict):
        for key, value in content.items():
            content[key] = _without_paths(value)
    return content


def note(after: NotebookNode, kind: str, source: str) -> NotebookNode:
    """Make a markdown cell that follows another cell, tagged with its kind."""
    cell: NotebookNode = nbformat.v4.new_markdown_cell(source, metadata={"tags": [kind]})
    cell.id = f"{after.id[: 63 - len(kind)]}-{kind}"
    return cell


def parameters(notebook: NotebookNode) -> dict[str, Any]:
    """Return the parameters that were passed to the run; empty if papermill did not run it."""
    found = papermill_of(notebook).get("parameters")
    return dict(found) if isinstance(found, dict) else {}


def seconds(cells: Iterable[NotebookNode]) -> float | None:
    """Return how long cells took in the run, in seconds; None if the run did not record it."""
    durations = [papermill_of(cell).get("duration") for cell in cells if cell.cell_type == "code"]
    known = [float(duration) for duration in durations if isinstance(duration, int | float) and 0 <= duration < math.inf]
    return sum(known) if known else None


def is_executed(notebook: NotebookNode) -> bool:
    """Return whether every code cell that is not empty has run."""
    return not left_out_of_run(notebook)


def left_out_of_run(notebook: NotebookNode) -> list[str]:
    """Name the non-empty code cells that have not run."""
    return [
        f"cell {number} (id {cell.get('id', 'unknown')})"
        for number, cell in enumerate(notebook.cells, start=1)
        if cell.cell_type == "code" and cell.source.strip()
        if cell.execution_count is None and "injected-parameters" not in tags(cell)
    ]


def has_results(notebook: NotebookNode) -> bool:
    """Return whether any code cell looks as if it has run."""
    return any(cell.cell_type == "code" and (cell.execution_count is not None or cell.outputs) for cell in notebook.cells)
