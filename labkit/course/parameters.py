"""The parameters of a notebook: the names that its cell tagged ``parameters`` sets."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

import nbformat

from labkit.errors import LabkitError


class UnknownParameterError(LabkitError, ValueError):
    """A parameter was given that a notebook does not have; papermill would ignore it with a warning.

    Attributes:
        notebook: The notebook.
        unknown: The names it does not have.
        known: The names it has.
    """

    def __init__(self, notebook: Path, unknown: Sequence[str], known: Sequence[str]) -> None:
        self.notebook, self.unknown, self.known = notebook, tuple(unknown), tuple(known)
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        names = ", ".join(known) or "none: it has no cell tagged 'parameters'"
        super().__init__(f"{notebook} has no parameter {', '.join(map(repr, unknown))}.{hint} It knows: {names}.")


def known_parameters(notebook: Path) -> list[str]:
    """The names assigned in the notebook's cell tagged ``parameters``, in order; empty without such a cell."""
    cells = nbformat.read(notebook, as_version=4).cells
    source = next((cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])), "")
    return [node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def refuse_unknown(notebook: Path, names: Iterable[str]) -> None:
    """Make sure that a notebook has parameters of these names.

    Raises:
        UnknownParameterError: It lacks one.
    """
    known = known_parameters(notebook)
    if unknown := [name for name in names if name not in known]:
        raise UnknownParameterError(notebook, unknown, known)
