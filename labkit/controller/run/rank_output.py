"""The display of the ranks' output in the running cell, while it runs.

Text is shown line by line, labelled with its rank. A line that is not finished yet (a progress bar, a prompt) is shown in a
separate display that is updated in place, and as text when it is finished or the run ends. So the saved notebook contains the
output of a rank once. If one rank writes more than LIMIT_CHARS in one run, the first half of the limit is shown at once. The last
half is shown when the run is over, after the number of characters between the two.
"""

from __future__ import annotations

import html
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from labkit.base.plain_text import name_ranks
from labkit.controller.output import Screen, heading, labelled
from labkit.wire.messages import Display, Stream, StreamName

# The limit for a rank's text in one run: a notebook of 100 MB cannot be opened.
LIMIT_CHARS = 1_000_000
LIVE_AFTER_S = 0.3
# While an unfinished line grows, only its end is shown; all of it is shown when it is finished.
LIVE_CHARS = 2000
# Output of one moment is shown in rank order: the order of arrival is chance.
GATHER_S = 0.05


class _Piece(NamedTuple):
    name: StreamName
    text: str


class _Tail:
    """The end of a rank's output, after its first half was full."""

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque()
        self._chars = 0
        self.left_out = 0

    def add(self, name: StreamName, text: str) -> None:
        """Add text, and drop the oldest text if it gets too much."""
        self._pieces.append(_Piece(name, text[-LIMIT_CHARS // 2 :]))
        self.left_out += len(text) - len(self._pieces[-1].text)
        self._chars += len(self._pieces[-1].text)
        while self._chars - len(self._pieces[0].text) >= LIMIT_CHARS // 2:
            self._drop(len(self._pieces[0].text))

    def gap(self, count: int) -> None:
        """Note that this many characters are missing here. Drop the text before them too, because the reader sees only one gap."""
        self.left_out += count + self._chars
        self._pieces.clear()
        self._chars = 0

    def _drop(self, count: int) -> None:
        name, text = self._pieces.popleft()
        if count < len(text):
            self._pieces.appendleft(_Piece(name, text[count:]))
        self._chars -= count
        self.left_out += count

    def pieces(self) -> Iterable[_Piece]:
        """Return the text that is left, cut to the limit."""
        if (over := self._chars - LIMIT_CHARS // 2) > 0:
            self._drop(over)
        return self._pieces


class RankOutput:
    """The output of one run, on the screen.

    Args:
        screen: The screen on which it appears.
        run_id: The run's number, for the names of displays.
        label: Whether to label output with its rank; False for a pool of one rank.
    """

    def __init__(self, screen: Screen, run_id: int, *, label: bool = True) -> None:
        self._screen, self._run_id, self._label = screen, run_id, label
        self._open: dict[tuple[int, StreamName], str] = {}
        self._shown: dict[int, int] = {}
        self._tails: dict[int, _Tail] = {}
        self._gaps: dict[tuple[int, StreamName], int] = {}
        self._live_since: float | None = None
        self._live_id: str | None = None
        self._live_text = ""
        self._values: dict[int, Display] = {}
        self._gathered: dict[int, list[Stream | Display]] = {}
        self._gathering_since = 0.0

    def feed(self, rank: int, items: Iterable[Stream | Display]) -> None:
        """Take output of a rank. It is shown within GATHER_S."""
        if not self._gathered:
            self._gathering_since = time.monotonic()
        self._gathered.setdefault(rank, []).extend(items)
        self.tick()

    def tick(self) -> None:
        """Show output that has been gathered for long enough. Call this a few times a second."""
        if time.monotonic() - self._gathering_since >= GATHER_S:
            self._show_gathered()
        self._update_live()

    def _show_gathered(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for rank, items in sorted(gathered.items()):
            self._show(rank, items)

    def _show(self, rank: int, items: Iterable[Stream | Display]) -> None:
        for item in items:
            if isinstance(item, Stream):
                self._feed_text(rank, item)
            elif item.action == "value":
                self._values[rank] = item
            else:
                self._close_lines(rank)
                self._feed_display(rank, item)

    def finish(self) -> None:
        """Show what is still open: unfinished lines, the values of last expressions, and the number of characters left out."""
        self._show_gathered()
        for rank, _ in sorted(self._open):
            self._close_lines(rank)
        self._update_live()
        for rank, tail in sorted(self._tails.items()):
            self._show_tail(rank, tail)
        self._show_values()

    def _show_tail(self, rank: int, tail: _Tail) -> None:
        pieces = list(tail.pieces())
        if tail.left_out:
            kept = self._shown.get(rank, 0) + sum(len(piece.text) for piece in pieces)
            note = f"... {tail.left_out:,} of {kept + tail.left_out:,} characters of output are left out here ...\n"
            self._screen.text("stderr", note, self._named(rank))
        for name, text in pieces:
            self._screen.text(name, text, self._named(rank))

    def _feed_text(self, rank: int, item: Stream) -> None:
        key = (rank, item.name)
        text = self._open.pop(key, "") + item.text
        body, newline, rest = text.rpartition("\n")
        if newline:
            self._show_lines(rank, item.name, body + "\n")
        if rest:
            self._open[key] = self._bounded(key, _settled(rest))

    def _bounded(self, key: tuple[int, StreamName], line: str) -> str:
        """Cut the middle out of an unfinished line that is too long."""
        if len(line) < 2 * LIMIT_CHARS:
            return line
        self._gaps[key] = self._gaps.get(key, 0) + len(line) - LIMIT_CHARS
        return line[: LIMIT_CHARS // 2] + line[-LIMIT_CHARS // 2 :]

    def _show_lines(self, rank: int, name: StreamName, text: str) -> None:
        gap = self._gaps.pop((rank, name), 0)
        if gap:  # it is in the first of these lines
            self._keep(rank, name, text[: LIMIT_CHARS // 2])
            self._tails.setdefault(rank, _Tail()).gap(gap)
            text = text[LIMIT_CHARS // 2 :]
        self._keep(rank, name, "".join(f"{_overwritten(line)}\n" for line in text[:-1].split("\n")))

    def _keep(self, rank: int, name: StreamName, text: str) -> None:
        """Show complete lines while there is room in the first half. Keep the end of the rest for later."""
        room = LIMIT_CHARS // 2 - self._shown.get(rank, 0)
        if rank not in self._tails and len(text) > room:
            self._tails[rank] = _Tail()
            first, newline, _ = text[:room].rpartition("\n")
            first = first + newline if newline else text[:room]
            self._show_now(rank, name, first)
            text = text[len(first) :]
            self._screen.text("stderr", "... the end of the output follows when the run is over ...\n", self._named(rank))
        if rank in self._tails:
            self._tails[rank].add(name, text)
        else:
            self._show_now(rank, name, text)

    def _show_now(self, rank: int, name: StreamName, text: str) -> None:
        if text:
            self._shown[rank] = self._shown.get(rank, 0) + len(text)
            self._screen.text(name, text, self._named(rank))

    def _close_lines(self, rank: int) -> None:
        for name in ("stdout", "stderr"):
            text = self._open.pop((rank, name), "")
            if text:
                self._show_lines(rank, name, text + "\n")

    def _feed_display(self, rank: int, item: Display) -> None:
        if item.action == "clear":
            self._screen.clear(item.wait, self._named(rank))
            self._shown.pop(rank, None)
            self._tails.pop(rank, None)
            return
        display_id = f"labkit-{self._run_id}-{rank}-{item.display_id}" if item.display_id else None
        self._screen.display(item.data, item.metadata, display_id, item.action == "update", self._named(rank))

    def _update_live(self) -> None:
        """Show unfinished lines in a separate display after they have been unfinished for a moment."""
        open_lines = sorted(self._open.items())
        text = "".join(labelled(f"{_end_of(_overwritten(line))}\n", self._named(rank)) for (rank, _), line in open_lines)
        text = text.removesuffix("\n")
        if not text and self._live_id is None:
            self._live_since = None
            return
        now = time.monotonic()
        if self._live_since is None:
            self._live_since = now
        if text == self._live_text or (text and now - self._live_since < LIVE_AFTER_S):
            return
        self._live_since, self._live_text = now, text
        data = {
            "text/plain": text,
            "text/html": f'<pre style="margin:0;font-family:monospace">{html.escape(text)}</pre>' if text else "",
        }
        first = self._live_id is None
        self._live_id = self._live_id or f"labkit-{self._run_id}-live"
        self._screen.display(data, {}, self._live_id, not first)

    def _show_values(self) -> None:
        """Show the value of the cell's last expression on each rank; equal displays once, with all their ranks."""
        groups: list[tuple[list[int], Display]] = []
        for rank, shown in sorted(self._values.items()):
            for ranks, other in groups:
                if other.data == shown.data:
                    ranks.append(rank)
                    break
            else:
                groups.append(([rank], shown))
        plain = [(ranks, shown.data.get("text/plain", "")) for ranks, shown in groups if set(shown.data) <= {"text/plain"}]
        if plain and len(plain) == len(groups):
            self._show_plain(plain)
            return
        for ranks, shown in groups:
            if self._label:
                self._screen.display(heading(ranks), {}, None, False)
            self._screen.display(shown.data, shown.metadata, None, False)

    def _show_plain(self, groups: list[tuple[list[int], str]]) -> None:
        def one(ranks: list[int], text: str) -> str:
            if not self._label:
                return text
            separator = "\n" if "\n" in text else " "
            return f"{name_ranks(ranks)}:{separator}{text}"

        self._screen.display({"text/plain": "\n".join(one(ranks, text) for ranks, text in groups)}, {}, None, False)

    def _named(self, rank: int) -> int | None:
        return rank if self._label else None


def _overwritten(line: str) -> str:
    """Return what a terminal shows of a line with carriage returns in it."""
    if "\r" not in line:
        return line
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown


def _end_of(line: str) -> str:
    return line if len(line) <= LIVE_CHARS else f"...{line[-LIVE_CHARS:]}"


def _settled(line: str) -> str:
    """Remove the text that carriage returns have overwritten, so that the line of a long-running progress bar does not grow."""
    head, returned, tail = line.rpartition("\r")
    return f"{_overwritten(head)}\r{tail}" if returned else line
