"""Writing of a learner's own unsolved copies of the labs, without overwriting the learner's changes.

| the copy ``NAME.ipynb`` in the learner's folder | what happens |
| --- | --- |
| is missing | it is written |
| is as labkit wrote it | it is replaced if the lab is newer |
| was changed or run, and belongs to this version of the lab | it stays |
| was changed or run, and the lab is newer | it stays, and the newer lab goes to ``NAME.v2.ipynb`` or the next free number |
| is not a notebook that labkit wrote, or cannot be read | it stays, and the lab goes to such a name too |
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO

import nbformat
from nbformat import NotebookNode

import labkit
from labkit.course.files import is_sealed, is_written, mark_of, read_notebook, refuse_foreign, replace_file, sealed
from labkit.course.handouts.copies.solutions import Secrets
from labkit.course.handouts.copies.student import student_copy
from labkit.errors import LabkitError

WRITER = "labkit lab"
_PACKAGE = Path(labkit.__file__).parent
#: In a wheel: the students' copies, without solutions (``setup.py`` writes them).
CARRIED = _PACKAGE / "course" / "learner" / "labs"
#: In a checkout: the labs with their solutions.
SOLVED = _PACKAGE.parent / "notebooks"


class LabNotFoundError(LabkitError, LookupError):
    """There is no lab of this name, or none at all."""


@dataclass(frozen=True)
class Copy:
    """A learner's copy of a lab.

    Attributes:
        path: The file.
        state: ``made`` now, ``renewed`` (it replaced an unchanged older copy), ``kept`` as it was, ``beside`` an older copy that
            the learner changed, or ``apart`` from a file of the lab's name that is not a readable copy.
    """

    path: Path
    state: str


def is_checkout() -> bool:
    """Return whether labkit runs from its repository, which has the labs with solutions."""
    return (_PACKAGE.parent / "pyproject.toml").is_file() and any(SOLVED.glob("*.ipynb"))


def student_labs() -> dict[str, NotebookNode]:
    """Return the labs without solutions and outputs, by name.

    Raises:
        LabNotFoundError: This installation has no labs.
        NotebookError: A lab cannot be read.
    """
    if is_checkout():
        read = {path.stem: read_notebook(path) for path in sorted(SOLVED.glob("*.ipynb"))}
        secrets = Secrets(read.values())
        return {stem: _without_outputs(student_copy(notebook, secrets)) for stem, notebook in read.items()}
    labs = {path.stem: read_notebook(path) for path in sorted(CARRIED.glob("*.ipynb"))}
    if not labs:
        raise LabNotFoundError("this installation of labkit has no labs. Install its wheel, or clone its repository.")
    return labs


def chosen(labs: Mapping[str, NotebookNode], names: tuple[str, ...]) -> dict[str, NotebookNode]:
    """Return the labs whose names begin with one of these texts, such as ``03``; all labs if none is given.

    Raises:
        LabNotFoundError: No lab, or more than one, begins with a text.
    """
    found: dict[str, NotebookNode] = {}
    for name in names:
        stems = [stem for stem in labs if stem.startswith(name.removesuffix(".ipynb"))]
        if len(stems) != 1:
            which = f"{len(stems)} labs begin" if stems else "no lab begins"
            raise LabNotFoundError(f"{which} with {name!r}. The labs are {', '.join(labs)}.")
        found[stems[0]] = labs[stems[0]]
    return found or dict(labs)


def write_copies(labs: Mapping[str, NotebookNode], folder: Path) -> list[Copy]:
    """Write the labs into the learner's folder, by the table in this module's docstring.

    Args:
        labs: The students' labs, by name.
        folder: The learner's folder; it is made if it is missing.

    Raises:
        PlaceError: The folder is a link or another user's.
        OverwriteError: Something that is not a notebook has a lab's name.
        OSError: A file cannot be written.
    """
    return [_write(stem, notebook, folder) for stem, notebook in labs.items()]


def _write(stem: str, notebook: NotebookNode, folder: Path) -> Copy:
    text = sealed(nbformat.from_dict(notebook), WRITER)
    version = json.loads(text)["metadata"]["labkit"]["sha256"]
    state = "made"
    for number in count(1):
        path = folder / (f"{stem}.ipynb" if number == 1 else f"{stem}.v{number}.ipynb")
        there = os.path.lexists(path)
        mark = mark_of(path) if there else None
        if mark is not None and mark.get("sha256") == version:
            return Copy(path, "kept")
        if not there or is_written(path, _is_copy):
            refuse_foreign(path, [], _is_copy, within=folder)
            replace_file(path, text, _is_copy, within=folder, make=True)
            return Copy(path, "renewed" if there else state)
        state = "beside" if mark is not None else "apart"
    raise AssertionError("count() has no end")


def _is_copy(file: BinaryIO) -> bool:
    return is_sealed(file, WRITER)


def _without_outputs(notebook: NotebookNode) -> NotebookNode:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook
