"""The students' copy: solutions become holes, predictions stay open, and what answers them is left out or folded."""

from __future__ import annotations

import re

import nbformat
from nbformat import NotebookNode

from labkit.course.handouts.copies.cells import clean_copy, is_for_instructor, note, num_predictions, paragraphs, tags
from labkit.course.handouts.copies.solutions import Secrets, has_solution, with_holes

# Outputs of these cells reveal what students have to find out.
_SOLVED = {"exercise", "check", "recap"}
# "Run all cells" continues after an error in these cells, which fail or show less while an exercise is unsolved.
_MAY_FAIL = {"exercise", "check", "uses-exercise"}
_ANSWER = re.compile(r"^\*\*(What to notice|Read it aloud)", re.MULTILINE)
_HEADING = re.compile(r"#{1,6} ")

PREDICTION = "prediction"
_OPEN_LINE = "**Your prediction:**"


def student_copy(executed: NotebookNode, secrets: Secrets) -> NotebookNode:
    """Make the students' copy of an executed notebook.

    From a **Predict first** or a cell with a solution up to the next heading, outputs are left out and the notes on them folded,
    because later outputs in a section often answer the question too. A cell for the prediction is added. Outputs that show a line
    of a solution, such as a traceback through it, are left out everywhere.

    Args:
        executed: The notebook; it is not changed.
        secrets: The lines that must not appear.
    """
    copied = clean_copy(executed)
    cells: list[NotebookNode] = []
    is_open = False
    for cell in copied.cells:
        if is_for_instructor(cell):
            continue
        if cell.cell_type == "markdown":
            is_open = _add_prose(cell, cells, is_open)
            continue
        cells.append(cell)
        if cell.cell_type == "code":
            if has_solution(cell.source):
                is_open = True
                cell.metadata["tags"] = sorted({"exercise", *tags(cell)})
            if tags(cell) & _MAY_FAIL:
                cell.metadata["tags"] = sorted({"raises-exception", *tags(cell)})
            cell.source = with_holes(cell.source)
            if is_open or tags(cell) & _SOLVED:
                cell.outputs = []
            cell.outputs = [output for output in cell.outputs if not secrets.in_notebook(output)]
            cell.execution_count = cell.execution_count if cell.outputs else None
    copied.cells = cells
    return copied


def _add_prose(cell: NotebookNode, cells: list[NotebookNode], is_open: bool) -> bool:
    """Add a markdown cell, split after each prediction, with its answers folded. Return whether a prediction is open at its end."""
    part, done = cell, []
    for paragraph in paragraphs(cell.source):
        if _HEADING.match(paragraph):
            is_open = False
        done.append(_folded(paragraph) if is_open and _ANSWER.search(paragraph) else paragraph)
        if num_predictions(paragraph):
            is_open = True
            part.source, done = "\n\n".join(done), []
            cells += [part, note(part, PREDICTION, _OPEN_LINE)]
            part = nbformat.from_dict(cell)
            part.id = f"{cell.id[:56]}-{len(cells)}"
    if done:
        part.source = "\n\n".join(done)
        cells.append(part)
    return is_open


def _folded(answer: str) -> str:
    found = _ANSWER.search(answer)
    assert found is not None
    return f"<details><summary>{found[1]}: open this when you have run the cells above</summary>\n\n{answer}\n\n</details>"
