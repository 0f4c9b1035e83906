"""The instructor's copy: solutions and all outputs, with notes on time, expected numbers and common mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nbformat import NotebookNode

from labkit.course.handouts.cells import clean_copy, note, num_predictions, parameters, seconds, tags
from labkit.course.handouts.mistakes import checks_in

NOTE = "instructor"
_HEADING = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)
_EXERCISE = re.compile(r"^#{2,6} (Exercise .+)$", re.MULTILINE)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def instructor_copy(executed: NotebookNode) -> NotebookNode:
    """Make the instructor's copy of an executed notebook.

    Behind the first cell stands the plan: the time that each section took in this run. Behind each check stand the numbers
    that it gave in this run, what it measures, and the mistakes that it knows.

    Args:
        executed: The notebook; it stays as it is.
    """
    copied = clean_copy(executed)
    by_id = {cell.id: cell for cell in executed.cells}
    cells: list[NotebookNode] = []
    exercise, solved_in = "", []
    for index, cell in enumerate(copied.cells):
        cells.append(cell)
        if index == 0:
            cells.append(note(cell, NOTE, _plan(executed)))
        if cell.cell_type == "markdown":
            exercise = found[-1] if (found := _EXERCISE.findall(cell.source)) else exercise
        elif "exercise" in tags(cell):
            solved_in.append(by_id[cell.id])
        elif "check" in tags(cell):
            cells.append(note(cell, NOTE, _exercise_note(exercise, [*solved_in, by_id[cell.id]], cell)))
            solved_in = []
    copied.cells = cells
    return copied


def _plan(executed: NotebookNode) -> str:
    total = seconds(executed.cells)
    given = ", ".join(f"`{name} = {value!r}`" for name, value in parameters(executed).items())
    ran = f"All cells together ran for {_duration(total)}" if total is not None else "The run recorded no times"
    lines = [
        "**For the instructor.** The outputs below are those of one run"
        + (f" with {given}" if given else " with the notebook's own parameters")
        + f". {ran}. Machine time only: reading and exercises come on top.",
        "",
        "| Section | Cells to run | Machine time | To do |",
        "|---|--:|--:|---|",
    ]
    for heading, cells in _sections(executed.cells):
        code = [cell for cell in cells if cell.cell_type == "code"]
        if not code:
            continue
        predictions = sum(map(num_predictions, cells))
        exercises = sum("exercise" in tags(cell) for cell in code)
        to_do = [
            f"{count} {word}{'s' if count > 1 else ''}" for count, word in ((predictions, "prediction"), (exercises, "exercise"))
        ]
        shown = ", ".join(text for text in to_do if not text.startswith("0 "))
        took = seconds(code)
        lines.append(f"| {heading} | {len(code)} | {_duration(took) if took is not None else 'not recorded'} | {shown} |")
    return "\n".join(lines)


def _sections(cells: Sequence[NotebookNode]) -> Iterator[tuple[str, list[NotebookNode]]]:
    heading = "Setup"
    inside: list[NotebookNode] = []
    for cell in cells:
        if cell.cell_type == "markdown" and (found := _HEADING.findall(cell.source)):
            yield heading, inside
            heading, inside = found[0].replace("|", "\\|"), []
        inside.append(cell)
    yield heading, inside


def _exercise_note(exercise: str, ran: Sequence[NotebookNode], check: NotebookNode) -> str:
    took = seconds(ran)
    parts = [f"**For the instructor. {exercise}**" if exercise else "**For the instructor.**"]
    checks = checks_in(check.source)
    parts += [f"What is measured: {found.what}" for found in checks if found.what]
    if said := _said(check):
        parts.append(f"What the solution gave in this run:\n\n```text\n{said}\n```")
    if took is not None:
        parts.append(f"Machine time of the exercise and its check: {_duration(took)}.")
    hints = [hint for found in checks for hint in found.hints]
    if hints:
        parts.append("Common mistakes, and what the check says to each:\n\n" + "\n".join(f"- {_escaped(hint)}" for hint in hints))
    return "\n\n".join(parts)


def _escaped(hint: str) -> str:
    return hint.replace("**", r"\*\*")  # a power, not bold


def _said(check: NotebookNode) -> str:
    """What the check put out, as plain text."""
    texts = (
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for output in check.outputs
        if "error" not in output.output_type
    )
    return _ANSI.sub("", "\n".join("".join(text).strip() for text in texts)).strip()


def _duration(value: float) -> str:
    if value < 1:
        return "under 1 s"
    return f"{value:.0f} s" if value < 90 else f"{value / 60:.1f} min"
