"""The exercises that a learner has solved, judged by the checks' saved outputs: something was printed, and no error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from nbformat import NotebookNode

from labkit.course.files import NotebookError, read_notebook
from labkit.course.handouts.copies.cells import about, tags, title
from labkit.course.learner.copies import LabNotFoundError
from labkit.errors import UnsolvedError

_EXERCISE = re.compile(r"^#{2,6} Exercise (\d+)[:.]?\s*([^★\n]*)", re.MULTILINE)
# What a check raises before there is an answer, or a hole in a cell that the check calls.
_UNANSWERED = {UnsolvedError.__name__, NotImplementedError.__name__}
_FACT = r"^\|\s*\*\*{}\*\*\s*\|\s*(.*?)\s*\|\s*$"


@dataclass(frozen=True)
class Exercise:
    """An exercise of a lab.

    Attributes:
        name: Its number and name, such as ``1: who has which rows?``.
        state: ``solved``, ``tried`` (its check refused the last answer), or ``open`` (there is no answer yet).
    """

    name: str
    state: str


@dataclass(frozen=True)
class LabState:
    """The state of one lab in a learner's folder.

    Attributes:
        path: The learner's copy.
        title: The lab's title.
        about: What a reader will be able to do after it.
        takes, needs: The lab's duration and requirements, from its first cell.
        exercises: Its exercises, in order.
    """

    path: Path
    title: str
    about: str
    takes: str
    needs: str
    exercises: tuple[Exercise, ...]

    @property
    def num_solved(self) -> int:
        """The number of solved exercises."""
        return sum(exercise.state == "solved" for exercise in self.exercises)


class Progress:
    """A table of a folder's labs: markdown in a notebook, plain text in a terminal.

    Args:
        labs: The labs.
        unread: The names of notebooks that cannot be read.
    """

    def __init__(self, labs: Sequence[LabState], unread: Sequence[str] = ()) -> None:
        self.labs, self.unread = labs, unread

    def __repr__(self) -> str:
        lines = []
        for lab in self.labs:
            lines.append(f"{lab.title} ({lab.path.name}): {_count(lab)}")
            lines += [f"  {exercise.state:6}  {exercise.name}" for exercise in lab.exercises]
        return "\n".join([*lines, *self._missing()])

    def _repr_markdown_(self) -> str:
        rows = ["| Lab | After it you can | Takes | Needs | Solved |", "|---|---|---|---|---|"]
        for lab in self.labs:
            cells = (f"[{lab.title}]({quote(lab.path.name)})", lab.about, lab.takes, lab.needs, _count(lab))
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        return "\n".join([*rows, *(f"\n{line}" for line in self._missing())])

    def _missing(self) -> list[str]:
        return [f"{name} cannot be read, and is not counted" for name in self.unread]


def progress(folder: str | Path = ".") -> Progress:
    """Return the state of all exercises of the labs in a folder, read from their saved copies.

    Args:
        folder: A folder that ``labkit lab`` has written.

    Raises:
        LabNotFoundError: The folder has no lab.

    Ranks: controller.
    """
    labs, unread = [], []
    for path in sorted(Path(folder).glob("*.ipynb")):
        try:
            notebook = read_notebook(path)
        except NotebookError:
            unread.append(path.name)  # an editor is still writing it, or it is damaged
            continue
        if (lab := _state_of(path, notebook)).exercises:
            labs.append(lab)
    if not labs:
        raise LabNotFoundError(f"there is no lab in {folder}. labkit lab writes them.")
    return Progress(labs, unread)


def _state_of(path: Path, notebook: NotebookNode) -> LabState:
    opening = str(notebook.cells[0].source) if notebook.cells else ""
    facts = (re.search(_FACT.format(name), opening, re.MULTILINE) for name in ("Takes", "Needs"))
    takes, needs = (fact[1] if fact else "" for fact in facts)
    return LabState(
        path,
        title(notebook),
        about(notebook).removeprefix("After this lab you can ").removeprefix("After these ten minutes you can "),
        takes,
        needs,
        tuple(_exercises(notebook.cells)),
    )


def _exercises(cells: Iterable[NotebookNode]) -> Iterable[Exercise]:
    name = ""
    for cell in cells:
        if cell.cell_type == "markdown" and (found := _EXERCISE.findall(cell.source)):
            name = ": ".join(part.strip() for part in found[-1] if part.strip())
        elif cell.cell_type == "code" and "check" in tags(cell):
            errors = [output.ename for output in cell.outputs if output.output_type == "error"]
            is_open = not cell.outputs or not _UNANSWERED.isdisjoint(errors)
            yield Exercise(name or "an exercise", "open" if is_open else "tried" if errors else "solved")


def _count(lab: LabState) -> str:
    return f"{lab.num_solved} of {len(lab.exercises)}"
