"""Where the solutions are in a notebook, what stands in their place for students, and whether any of them leaks.

A solution stands between ``### BEGIN SOLUTION`` and ``### END SOLUTION``, the convention of nbgrader.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Any

from nbformat import NotebookNode

_REGION = re.compile(
    r"^(?P<indent>[ \t]*)### BEGIN SOLUTION[^\n]*\n(?P<body>.*?)^[ \t]*### END SOLUTION[^\n]*$", re.MULTILINE | re.DOTALL
)
_HOLE = "{indent}# YOUR CODE HERE\n{indent}raise NotImplementedError"
_TAG = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
# A shorter one, such as `break` or `n += 1`, stands in other texts by chance.
_TELLING_CHARS = 8


def with_holes(source: str) -> str:
    """The source with a hole in the place of each solution: a comment, and an error for who runs the cell as it is."""
    return _REGION.sub(lambda found: _HOLE.format(indent=found["indent"]), source)


def solution_lines(source: str) -> list[str]:
    """The lines of the solutions in a source, stripped, without the empty ones."""
    lines = (line.strip() for found in _REGION.finditer(source) for line in found["body"].splitlines())
    return [line for line in lines if line]


class Secrets:
    """The lines that no student may find: those of solutions that the notebooks do not show elsewhere.

    Args:
        notebooks: All notebooks of the set. A line that one of them shows outside its solutions is no secret in any.
    """

    def __init__(self, notebooks: Iterable[NotebookNode]) -> None:
        sources = [str(cell.source) for notebook in notebooks for cell in notebook.cells]
        given = "\n".join(map(with_holes, sources))
        given_lines, given_text = {line.strip() for line in given.splitlines()}, _squeezed(given)
        lines = dict.fromkeys(line for source in sources for line in solution_lines(source))
        self.lines = [line for line in lines if line not in given_lines and _squeezed(line) not in given_text]
        self._telling = {_squeezed(line): line for line in self.lines if len(_squeezed(line)) >= _TELLING_CHARS}

    def in_text(self, text: str) -> list[str]:
        """The secret lines in a text, however it is wrapped and indented; short ones only where they are a whole line."""
        squeezed, whole = _squeezed(text), {line.strip() for line in text.splitlines()}
        found = [line for key, line in self._telling.items() if key in squeezed]
        return found + [line for line in self.lines if line not in found and line in whole]

    def in_page(self, page: str) -> list[str]:
        """The secret lines in an HTML page: in what it shows and in its markup."""
        return self.in_text(html.unescape(_TAG.sub("", page))) or self.in_text(html.unescape(page))

    def in_notebook(self, content: Any) -> list[str]:
        """The secret lines anywhere in a notebook, or in a part of one: sources, outputs, metadata, widget state."""
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
        # A text may come as a list of its lines.
        if content and all(isinstance(item, str) for item in content):
            yield "".join(content)
        for item in content:
            yield from _texts(item)
