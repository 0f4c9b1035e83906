"""The instructor's copy: solutions and all outputs, with notes on time, expected numbers and common mistakes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbformat import NotebookNode

from labkit.course.handouts.copies.cells import clean_copy, note, num_predictions, paragraphs, parameters, seconds, tags
from labkit.course.handouts.copies.mistakes import checks_in
from labkit.course.handouts.copies.solutions import has_solution

NOTE = "instructor"
WORDS_PER_MINUTE, MINUTES_PER_PREDICTION, MINUTES_PER_STAR = 200, 2, 5
_HEADING = re.compile(r"#{2,3} (.+)")
_EXERCISE = re.compile(r"^#{2,6} (Exercise .+)$", re.MULTILINE)
_OTHER = "what the hint says"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def instructor_copy(executed: NotebookNode) -> NotebookNode:
    """Make the instructor's copy of an executed notebook.

    After the first cell comes the plan: the estimated time to teach each section, and how long it ran. After each check come the
    numbers that it printed in this run, what it measures, and the mistakes that it recognizes.

    Args:
        executed: The notebook; it is not changed.
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


@dataclass
class _Section:
    """The cells between two headings."""

    heading: str
    num_words: int = 0
    num_predictions: int = 0
    code: list[NotebookNode] = field(default_factory=list)

    @property
    def num_exercises(self) -> int:
        return sum("exercise" in tags(cell) or has_solution(cell.source) for cell in self.code)

    @property
    def minutes(self) -> float:
        stars = (self.heading.count("★") or self.num_exercises) if self.num_exercises else 0
        asked = MINUTES_PER_PREDICTION * self.num_predictions + MINUTES_PER_STAR * stars
        return self.num_words / WORDS_PER_MINUTE + asked + (seconds(self.code) or 0) / 60

    @property
    def to_do(self) -> str:
        counts = ((self.num_predictions, "prediction"), (self.num_exercises, "exercise"))
        return ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count)


def _plan(executed: NotebookNode) -> str:
    total = seconds(executed.cells)
    given = ", ".join(f"`{name} = {value!r}`" for name, value in parameters(executed).items()) or "the notebook's own parameters"
    ran = f"All cells together ran for {_duration(total)}" if total is not None else "The run recorded no times"
    sections = [section for section in _sections(executed.cells) if section.code or section.num_words]
    lines = [
        f"**For the instructor.** The outputs below are those of one run with {given}. {ran}.",
        "",
        f"**Teaching takes about {_minutes(sum(section.minutes for section in sections))}.** This is an estimate by rule: "
        f"{WORDS_PER_MINUTE} words of text a minute, {MINUTES_PER_PREDICTION} minutes a prediction, "
        f"{MINUTES_PER_STAR} minutes a star of an exercise, and the machine time of this run. "
        "If time runs short, show the solution of an exercise and its output instead of letting students work on it.",
        "",
        "| Section | Teaching | To do | Cells to run | Machine time |",
        "|---|--:|---|--:|--:|",
    ]
    for section in sections:
        took = seconds(section.code)
        machine_time = _duration(took) if took is not None else "not recorded" if section.code else ""
        heading = section.heading.replace("|", "\\|")
        lines.append(f"| {heading} | {_minutes(section.minutes)} | {section.to_do} | {len(section.code)} | {machine_time} |")
    return "\n".join(lines)


def _sections(cells: Sequence[NotebookNode]) -> list[_Section]:
    sections = [_Section("Setup")]
    for cell in cells:
        if cell.cell_type == "code":
            sections[-1].code.append(cell)
        for paragraph in paragraphs(cell.source) if cell.cell_type == "markdown" else ():
            if found := _HEADING.match(paragraph):
                sections.append(_Section(found[1]))
            sections[-1].num_words += len(paragraph.split())
            sections[-1].num_predictions += num_predictions(paragraph)
    return sections


def _minutes(value: float) -> str:
    return f"{max(1, round(value))} min"


def _exercise_note(exercise: str, ran: Sequence[NotebookNode], check: NotebookNode) -> str:
    took = seconds(ran)
    parts = [f"**For the instructor. {exercise}**" if exercise else "**For the instructor.**"]
    checks = checks_in(check.source)
    parts += [f"What is measured: {found.what}" for found in checks if found.what]
    if said := _said(check):
        parts.append(f"Output of the solution in this run:\n\n```text\n{said}\n```")
    if took is not None:
        parts.append(f"Machine time of the exercise and its check: {_duration(took)}.")
    mistakes = [mistake for found in checks for mistake in found.mistakes]
    if mistakes:
        rows = "\n".join(f"| {_in_cell(mistake.seen) or _OTHER} | {_in_cell(mistake.hint)} |" for mistake in mistakes)
        head = "| What the check sees | What it says |\n|---|---|"
        parts.append(f"Common mistakes (code is the check's own test of an answer):\n\n{head}\n{rows}")
    return "\n\n".join(parts)


def _in_cell(text: str) -> str:
    """Escape a text for a table cell; outside code, ``**`` is a power, not bold."""
    pieces = text.replace("|", r"\|").split("`")
    return "`".join(piece if number % 2 else piece.replace("**", r"\*\*") for number, piece in enumerate(pieces))


def _said(check: NotebookNode) -> str:
    """Return a check's output as plain text."""
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
