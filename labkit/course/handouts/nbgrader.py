"""Conversion of notebooks into assignments that nbgrader releases, collects and grades: ``labkit nbgrader``.

nbgrader stores a cell's kind in its metadata, while the notebooks store it in tags. Exercises have solutions between markers that
nbgrader recognizes. A failed check raises, which costs points in nbgrader.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, BinaryIO

import click
import nbformat
from nbformat import NotebookNode

from labkit.course.files import is_sealed, read_notebook, refuse_foreign, replace_file, sealed, shown
from labkit.course.handouts.copies.cells import tags
from labkit.errors import LabkitError

BEGIN = "### BEGIN SOLUTION"
_WRITER = "labkit nbgrader"
_EXERCISE = re.compile(r"^### Exercise[^\n★]*(★*)", re.MULTILINE)


class AssignmentError(LabkitError, ValueError):
    """A notebook has nothing that can be graded."""


def assignment_of(notebook: NotebookNode) -> NotebookNode:
    """Return a notebook with nbgrader's metadata: exercises are solution cells; checks are locked and give a point per star.

    Args:
        notebook: The notebook; it is not changed.

    Raises:
        AssignmentError: It has no exercise or no check.
    """
    assignment: NotebookNode = nbformat.from_dict(notebook)
    points, num_exercises, num_checks = 1, 0, 0
    for cell in assignment.cells:
        cell.metadata.pop("nbgrader", None)
        if cell.cell_type == "markdown" and (found := _EXERCISE.findall(cell.source)):
            points = max(1, len(found[-1]))
        if BEGIN in cell.source:
            cell.metadata["nbgrader"] = _metadata(f"exercise-{cell.id}", solution=True)
            num_exercises += 1
        elif "check" in tags(cell):
            cell.metadata["nbgrader"] = _metadata(f"check-{cell.id}", grade=True, locked=True, points=points)
            num_checks += 1
    if not num_exercises or not num_checks:
        raise AssignmentError(f"{num_exercises} exercises and {num_checks} checks: an assignment needs both. Take one of the labs.")
    return assignment


def _metadata(grade_id: str, *, points: int | None = None, **is_true: bool) -> dict[str, Any]:
    kinds = {"grade": False, "solution": False, "locked": False, "task": False} | is_true
    return {"schema_version": 3, "grade_id": grade_id, **kinds} | ({} if points is None else {"points": points})


def _is_assignment(file: BinaryIO) -> bool:
    return is_sealed(file, _WRITER)


@click.command()
@click.argument("notebooks", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/nbgrader"), show_default=True)
def nbgrader(notebooks: tuple[Path, ...], out: Path) -> None:
    """Write notebooks as assignments of nbgrader.

    Each of NOTEBOOKS goes to OUT/source/NAME/NAME.ipynb. In OUT, `nbgrader generate_assignment NAME --create` makes the release
    without solutions, and `nbgrader autograde NAME` grades submissions. A check gives as many points as its exercise has stars. All
    notebooks are read before the first is written. The only files replaced are assignments of an earlier call that nobody has
    changed since. Folders in OUT that are links, or another user's, are refused.
    """
    made: dict[Path, str] = {}
    try:
        for path in notebooks:
            target = out / "source" / path.stem / f"{path.stem}.ipynb"
            if target in made:
                raise AssignmentError(f"there are several notebooks named {shown(path.stem)}")
            refuse_foreign(target, notebooks, _is_assignment, within=out)
            made[target] = sealed(assignment_of(read_notebook(path)), _WRITER)
    except AssignmentError as error:
        raise click.ClickException(f"{shown(path)}: {error}") from None
    except LabkitError as error:
        raise click.ClickException(str(error)) from None
    for target, text in made.items():
        try:
            replace_file(target, text, _is_assignment, within=out, make=True)
        except LabkitError as error:
            raise click.ClickException(str(error)) from None
        except OSError as error:
            raise click.ClickException(f"{shown(target)} cannot be written: {error.strerror}") from None
        click.echo(f"made {shown(target)}")
