"""A notebook's parameters: the names that its cell tagged ``parameters`` sets."""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from labkit.course.files import NotebookError, read_notebook, shown
from labkit.errors import LabkitError

INJECTED = "injected-parameters"
_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}")}


class UnknownParameterError(LabkitError, ValueError):
    """A notebook lacks a given parameter, which papermill would ignore with a warning.

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
        super().__init__(f"{shown(notebook)} has no parameter {', '.join(map(repr, unknown))}.{hint} It knows: {names}.")


class ParameterValueError(LabkitError, ValueError):
    """A value cannot be written into a notebook as a Python literal."""


def source_of(value: Any) -> str:
    """Return a value as Python source that evaluates to it in an empty namespace.

    Raises:
        ParameterValueError: The value is not a literal; the message says what is accepted.
    """
    if value is ...:
        return "..."
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex) and not (math.isfinite(value.real) and math.isfinite(value.imag)):
        return f"complex({source_of(value.real)}, {source_of(value.imag)})"
    if type(value) is dict:
        return f"{{{', '.join(f'{source_of(key)}: {source_of(item)}' for key, item in value.items())}}}"
    if type(value) in _BRACKETS:
        begin, end = _BRACKETS[type(value)]
        comma = "," if len(value) == 1 and begin == "(" else ""
        return f"{begin}{', '.join(map(source_of, value))}{comma}{end}" if value or begin != "{" else "set()"
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        try:
            str(value).encode()
            return repr(value)
        except ValueError:  # text that is not UTF-8, or an integer of more digits than Python prints
            pass
    raise ParameterValueError(
        f"{ascii(value) if type(value) is str else type(value).__name__} cannot be a parameter. Accepted are numbers (of up "
        "to 4,300 digits), text in UTF-8, bytes, True, False, None, ..., and lists, tuples, sets and dicts of these."
    )


def known_parameters(notebook: Path) -> list[str]:
    """Return the names assigned in a notebook's cell tagged ``parameters``, in order; none if it has no such cell.

    Raises:
        NotebookError: The file is not a notebook, or that cell is not plain Python.
    """
    cells = read_notebook(notebook).cells
    number, source = next(((at, cell.source) for at, cell in enumerate(cells, 1) if is_parameters(cell)), (0, ""))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or type(error).__name__
        raise NotebookError(f"{shown(notebook)}, cell {number}: its parameters cannot be read: {reason}.") from None
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def is_parameters(cell: NotebookNode) -> bool:
    """Return whether a cell is the one that sets the notebook's parameters."""
    return cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", ())


def refuse_unknown(notebook: Path, names: Iterable[str]) -> None:
    """Make sure that a notebook has parameters with these names.

    Raises:
        UnknownParameterError: It lacks one.
        NotebookError: See `known_parameters`.
    """
    known = known_parameters(notebook)
    if unknown := [name for name in names if name not in known]:
        raise UnknownParameterError(notebook, unknown, known)


def inject(notebook: NotebookNode, sources: Mapping[str, str]) -> None:
    """Set parameters in a cell after the one tagged ``parameters``, replacing such cells from an earlier run.

    Args:
        notebook: A notebook that has parameters with these names.
        sources: Their values, from `source_of`.
    """
    source = "\n".join(["# Parameters", *(f"{name} = {value}" for name, value in sources.items())])
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": [INJECTED]})
    earlier = [at for at, found in enumerate(notebook.cells) if INJECTED in found.metadata.get("tags", ())]
    for at in reversed(earlier):
        del notebook.cells[at]
    at = next(at for at, found in enumerate(notebook.cells) if is_parameters(found))
    notebook.cells.insert(at + 1, cell)
