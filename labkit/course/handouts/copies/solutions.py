"""Solutions in a notebook: finding them, replacing them by holes for students, and searching files for leaks.

A solution is between ``### BEGIN SOLUTION`` and ``### END SOLUTION``, as in nbgrader.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Any

from nbformat import NotebookNode

from labkit.course.handouts.copies.cells import is_for_instructor
from labkit.course.handouts.errors import HandoutError

_REGION = re.compile(
    r"^(?P<indent>[ \t]*)### BEGIN SOLUTION[^\n]*\n(?P<body>.*?)^[ \t]*### END SOLUTION[^\n]*$", re.MULTILINE | re.DOTALL
)
_MARKER = re.compile(r"[ \t]*### (BEGIN|END) SOLUTION")
# Text that was probably meant as a marker: different case, different signs, or a different number of #.
_ALMOST = re.compile(r"(#|//|<!--)[\W_]*(BEGIN|START|END|STOP)[\W_]*(OF[\W_]*)?(THE[\W_]*)?SOLUTION", re.IGNORECASE)
_HOLE = "{indent}# YOUR CODE HERE\n{indent}raise NotImplementedError"
_TAG = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
# Shorter lines, such as `break` or `n += 1`, occur in other texts by chance.
_TELLING_CHARS = 8


def require_paired_markers(notebook: NotebookNode, name: str) -> None:
    """Refuse markers that would expose a solution.

    Args:
        notebook: The notebook.
        name: Its name, for the message.

    Raises:
        HandoutError: A marker has no counterpart, or a line is nearly a marker; the message names cell and line.
    """
    for number, cell in enumerate(notebook.cells, start=1):
        if not is_for_instructor(cell) and (wrong := _wrong_marker(cell)):
            line, problem = wrong
            raise HandoutError(
                f"{name}, cell {number} (id {cell.get('id', 'unknown')}), line {line}: {problem}. Put a solution between a line "
                "### BEGIN SOLUTION and a line ### END SOLUTION in one cell; anything else would be handed out."
            )


def _wrong_marker(cell: NotebookNode) -> tuple[int, str] | None:
    """Return the number of the first line in a cell that could leak a solution, and the reason."""
    begun = 0
    for number, line in enumerate(cell.source.splitlines(), start=1):
        if marker := _MARKER.match(line):
            if cell.cell_type != "code":
                return number, f"{line.strip()!r} in a cell without code, which cannot have a hole (tag it `solution`)"
            if (marker[1] == "BEGIN") == bool(begun):
                return number, f"{line.strip()!r} has no {'END before it' if begun else 'BEGIN'}"
            begun = number if marker[1] == "BEGIN" else 0
        # Elsewhere in a line, a marker is only mentioned.
        elif _ALMOST.search(line) if cell.cell_type == "code" else _ALMOST.match(line.strip()):
            return number, f"{line.strip()!r} is almost a marker"
    return (begun, "'### BEGIN SOLUTION' has no END") if begun else None


def has_solution(source: str) -> bool:
    """Return whether part of the source is a solution."""
    return _REGION.search(source) is not None


def with_holes(source: str) -> str:
    """Replace each solution in the source by a hole: a comment, and an error for students who run the cell unchanged."""
    return _REGION.sub(lambda found: _HOLE.format(indent=found["indent"]), source)


def solution_lines(source: str) -> list[str]:
    """Return the lines of the solutions in a source, stripped, without the empty ones."""
    lines = (line.strip() for found in _REGION.finditer(source) for line in found["body"].splitlines())
    return [line for line in lines if line]


class Secrets:
    """The lines that students must not see: those in solutions that the notebooks do not show elsewhere.

    Args:
        notebooks: All notebooks in the set. A line that any of them shows outside its solutions is not secret in the others either.
    """

    def __init__(self, notebooks: Iterable[NotebookNode]) -> None:
        cells = [cell for notebook in notebooks for cell in notebook.cells]
        sources = [str(cell.source) for cell in cells]
        given = "\n".join(with_holes(str(cell.source)) for cell in cells if not is_for_instructor(cell))
        given_lines, given_text = {line.strip() for line in given.splitlines()}, _squeezed(given)
        lines = dict.fromkeys(line for source in sources for line in solution_lines(source))
        self.lines = [line for line in lines if line not in given_lines and _squeezed(line) not in given_text]
        self._telling = {_squeezed(line): line for line in self.lines if len(_squeezed(line)) >= _TELLING_CHARS}

    def in_text(self, text: str) -> list[str]:
        """Return the secret lines in a text, however it is wrapped or indented; short ones count only as whole lines."""
        squeezed, whole = _squeezed(text), {line.strip() for line in text.splitlines()}
        found = [line for key, line in self._telling.items() if key in squeezed]
        return found + [line for line in self.lines if line not in found and line in whole]

    def in_page(self, page: str) -> list[str]:
        """Return the secret lines in an HTML page, whether in visible text or in markup."""
        return self.in_text(html.unescape(_TAG.sub("", page))) or self.in_text(html.unescape(page))

    def in_notebook(self, content: Any) -> list[str]:
        """Return the secret lines anywhere in a notebook or part of one: sources, outputs, metadata, widget state."""
        return [line for text in _texts(content) for line in (self.in_page(text) if "<" in text else self.in_text(text))]


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield str(key)
            yield from _texts(value)
    elif isinstance(content, list):
        # A text may be a list of its lines.
        if content and all(isinstance(item, str) for item in content):
            yield "".join(content)
        for item in content:
            yield from _texts(item)
