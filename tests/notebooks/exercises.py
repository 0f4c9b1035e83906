"""The solutions in the notebooks, and the objects that they define."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).parents[2] / "notebooks"


def exercise_cell(notebook: str, marker: str) -> str:
    """The notebook's one solved exercise cell that holds the marker, without its magic.

    Args:
        notebook: The file's name without its ending.
        marker: A text that occurs in this cell only.
    """
    cells = nbformat.read(FOLDER / f"{notebook}.ipynb", as_version=4).cells
    sources = [cell.source for cell in cells if "exercise" in cell.metadata.get("tags", ())]
    (source,) = [source for source in sources if marker in source]
    return re.sub(r"\A%%spmd.*\n", "", source)


def defined_by(source: str, name: str, **given: Any) -> Any:
    """Return the object that a cell defines under a name.

    Args:
        source: The cell.
        name: The name.
        **given: What the notebook has defined before it.
    """
    namespace = dict(given)
    exec(source, namespace)
    return namespace[name]


def with_mistake(source: str, old: str, new: str) -> str:
    """The solution with one mistake in it."""
    assert old in source, f"{old!r} is not in the solution"
    return source.replace(old, new)
