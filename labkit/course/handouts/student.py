"""The students' copy: solutions are holes, exercises have no outputs, predictions are open."""

from __future__ import annotations

import re

from nbformat import NotebookNode

from labkit.course.handouts.cells import clean_copy, note, num_predictions, tags
from labkit.course.handouts.solutions import Secrets, with_holes

# Outputs of these cells tell what a student is to find out.
_SOLVED = {"exercise", "check", "recap"}
_ANSWER = re.compile(r"^\*\*(What to notice|Read it aloud)[^\n]*(?:\n(?!\n)[^\n]*)*", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} ", re.MULTILINE)

PREDICTION = "prediction"
_OPEN_LINE = "**Your prediction:**"


def student_copy(executed: NotebookNode, secrets: Secrets) -> NotebookNode:
    """Make the students' copy of an executed notebook.

    After a cell that says **Predict first**, the outputs are left out up to the answer, which is folded; a cell to write
    the prediction into is added. An output that shows a line of a solution, such as a traceback through it, is left out too.

    Args:
        executed: The notebook; it stays as it is.
        secrets: The lines that must not appear.
    """
    copied = clean_copy(executed)
    cells: list[NotebookNode] = []
    is_open = False
    for cell in copied.cells:
        if cell.cell_type == "markdown":
            is_open = _read_prose(cell, cells, is_open)
            continue
        cells.append(cell)
        if cell.cell_type == "code":
            cell.source = with_holes(cell.source)
            if is_open or tags(cell) & _SOLVED:
                cell.outputs = []
            cell.outputs = [output for output in cell.outputs if not secrets.in_notebook(output)]
            cell.execution_count = cell.execution_count if cell.outputs else None
    copied.cells = cells
    return copied


def _read_prose(cell: NotebookNode, cells: list[NotebookNode], is_open: bool) -> bool:
    """Add a markdown cell, its answer folded; say whether a prediction is open after it."""
    cells.append(cell)
    if _HEADING.search(cell.source) or _ANSWER.search(cell.source):
        if is_open:
            cell.source = _ANSWER.sub(_folded, cell.source)
        is_open = False
    if num_predictions(cell):
        cells.append(note(cell, PREDICTION, _OPEN_LINE))
        is_open = True
    return is_open


def _folded(answer: re.Match[str]) -> str:
    summary = f"{answer[1]}: open this when you have run the cells above"
    return f"<details><summary>{summary}</summary>\n\n{answer[0]}\n\n</details>"
