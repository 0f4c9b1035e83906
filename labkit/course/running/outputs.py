r"""The outputs of a cell while it runs: streams joined as a terminal shows them, and a limit on how much is kept.

Each piece takes time proportional to its own length, whatever a notebook prints: millions of lines, one line of 20 MB, or endless
carriage returns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_output

# In characters. The copies of the course's notebooks hold at most a tenth of this.
CELL_LIMIT = 5_000_000
NOTEBOOK_LIMIT = 20_000_000
# The beginning and the end of an error's text are kept in any case.
ERROR_CHARS = 20_000
MAX_FRAMES = 100
_SLICE = 1 << 20


class StreamText:
    r"""The text of one stream. A carriage return takes back the line so far, unless a line feed follows it."""

    def __init__(self) -> None:
        self.size = 0
        self._lines: list[str] = []
        self._line: list[str] = []
        self._line_size = 0
        self._returned = False  # the last character was a carriage return, and the next one decides its effect

    def add(self, text: str) -> None:
        """Append text."""
        for start in range(0, len(text), _SLICE):
            self._add(text[start : start + _SLICE])

    def _add(self, piece: str) -> None:
        if self._returned:
            piece, self._returned, self.size = "\r" + piece, False, self.size - 1
        if piece.endswith("\r"):
            piece, self._returned, self.size = piece[:-1], True, self.size + 1
        if piece.count("\r") == piece.count("\r\n"):
            at = piece.rfind("\n") + 1
            self._keep(piece[:at], piece[at:])
            return
        *complete, last = piece.split("\n")
        if complete:
            # A carriage return at the very end, before the line feed, belongs to the line's end.
            ends = [line.rfind("\r", 0, max(0, len(line) - 1)) + 1 for line in complete]
            self._take_back(ends[0])
            self._keep("\n".join(line[at:] for at, line in zip(ends, complete, strict=True)) + "\n", "")
        self._take_back(at := last.rfind("\r") + 1)
        self._keep("", last[at:])

    def _take_back(self, at: int) -> None:
        if at:
            self.size -= self._line_size
            self._line, self._line_size = [], 0

    def _keep(self, complete: str, rest: str) -> None:
        if complete:
            self._lines += [*self._line, complete]
            self._line, self._line_size = [], 0
        if rest:
            self._line.append(rest)
            self._line_size += len(rest)
        self.size += len(complete) + len(rest)

    def __str__(self) -> str:
        return "".join([*self._lines, *self._line, "\r" if self._returned else ""])


class CellOutputs:
    """A collector of a cell's output.

    Args:
        cell: The cell; its outputs are filled in.
        limit: The number of characters that may be kept.

    Attributes:
        is_cut: Whether something was left out.
    """

    def __init__(self, cell: NotebookNode, limit: int) -> None:
        self.cell, self.limit, self.is_cut = cell, limit, False
        self._streams: dict[str, tuple[NotebookNode, StreamText]] = {}
        self._replaceable: dict[Hashable, int] = {}
        self._late_error: NotebookNode | None = None
        self._is_finished = False
        self._size = 0

    def clear(self) -> None:
        """Forget the output that the cell has cleared."""
        self._streams, self._replaceable, self._size = {}, {}, 0

    @property
    def size(self) -> int:
        """The number of characters that are kept."""
        return self._size + sum(stream.size for _, stream in self._streams.values())

    def stream(self, name: str, text: str) -> None:
        """Add to one of the two streams. Each is one output, at the place where it began; stderr comes after stdout."""
        if self.is_cut:
            return
        if name not in self._streams:
            output = new_output("stream", name=name, text="")
            outputs = self.cell.outputs
            before_errors = name == "stdout" and outputs and outputs[-1].get("name") == "stderr"
            outputs.insert(len(outputs) - bool(before_errors), output)
            self._streams[name] = (output, StreamText())
        stream = self._streams[name][1]
        # Add in pieces: a carriage return in one makes room for the next.
        for start in range(0, len(text), _SLICE):
            room = self.limit - self.size
            piece = text[start : start + _SLICE]
            stream.add(piece[: room + 1])
            if len(piece) > room + 1 or self.size > self.limit:
                self.is_cut = True
                return

    def fits(self, content: Any, key: Hashable = None, copies: int = 1) -> bool:
        """Return whether another output may be kept. If so, count it.

        Args:
            content: The message.
            key: The output it replaces: an earlier one with the same key is no longer counted.
            copies: The number of places where it appears.
        """
        if self.is_cut:
            return False
        size = copies * sum(map(len, _texts(content)))
        more = size - self._replaceable.get(key, 0)
        self.is_cut = self.size + more > self.limit
        if not self.is_cut:
            self._size += more
            if key is not None:
                self._replaceable[key] = size
        return not self.is_cut

    def error(self, content: dict[str, Any]) -> bool:
        """Shorten an error and return whether it may be kept now. After output was cut, only the last error is kept, at the end."""
        content["evalue"] = shortened(str(content.get("evalue", "")))
        content["traceback"] = [shortened(str(line)) for line in content.get("traceback") or ()][-MAX_FRAMES:]
        if self.fits(content):
            return True
        self._late_error = new_output("error", ename=str(content.get("ename")), **{k: content[k] for k in ("evalue", "traceback")})
        return False

    def finish(self) -> None:
        """Write the streams into the cell, and note if something was left out."""
        for output, stream in self._streams.values():
            output["text"] = str(stream)
        if self.is_cut and not self._is_finished:
            text = f"labkit run keeps {self.limit:,} characters of this cell's output; the rest was left out.\n"
            self.cell.outputs.append(new_output("stream", name="stderr", text=text))
            self.cell.outputs += [] if self._late_error is None else [self._late_error]
        self._is_finished = True


def shortened(text: str) -> str:
    """Return a text without its middle if it is very long."""
    half = ERROR_CHARS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n... {left_out:,} characters left out ...\n{text[-half:]}"


def _texts(content: Any) -> Iterator[str]:
    """Yield all texts in a message. Any other value counts as one character."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from _texts(value)
    elif isinstance(content, list):
        for value in content:
            yield from _texts(value)
    else:
        yield " "
