"""Shows what the ranks put out, in the cell that runs, while it runs.

Text is shown line by line, and the screen is told whose it is. A line that is not finished yet (a progress bar, a prompt) is
shown in one display of its own that is updated in place, and as text when it is finished or the run ends. So nothing that a
rank wrote is lost in the saved notebook, and nothing is shown twice.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from labkit.ranks import name_ranks
from labkit.wire.messages import Display, Stream, StreamName

# A rank's text beyond this many characters in one run is counted, not shown: a notebook of 100 MB cannot be opened.
LIMIT_CHARS = 1_000_000
LIVE_AFTER_S = 0.3
# Of an unfinished line the end is shown while it grows; the whole of it when it is finished.
LIVE_CHARS = 2000
# Output of one moment is shown in rank order and not in order of arrival, which is chance.
GATHER_S = 0.05


class Screen(Protocol):
    """Where output appears, and how it says whose it is. A rank of None needs no name: the pool has one rank, or all are meant."""

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        """Show whole lines of a rank."""

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        """Show or update a mime bundle of a rank."""

    def clear(self, wait: bool) -> None:
        """Clear the cell's output."""


class TerminalScreen:
    """Plain standard streams, for scripts and terminals.

    Args:
        places: The machine of each rank, where there is more than one.
    """

    def __init__(self, places: Mapping[int, str] | None = None) -> None:
        self._places = places or {}

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        """Write to the stream of that name, with the rank in front of each line."""
        stream = sys.stdout if name == "stdout" else sys.stderr
        stream.write(labelled(text, rank, self._places))
        stream.flush()

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        """Write the bundle's text, under the rank's name."""
        if "text/plain" in data and not update:
            owner = "" if rank is None else f"{heading((rank,))['text/plain']}\n"
            self.text("stdout", f"{owner}{data['text/plain']}\n")

    def clear(self, wait: bool) -> None:
        """A terminal keeps what it has shown."""


class NotebookScreen(TerminalScreen):
    """The running cell of a Jupyter kernel."""

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        """Publish the bundle, under the rank's name."""
        from IPython.display import publish_display_data

        if rank is not None and not update:
            publish_display_data(heading((rank,)))
        transient = {"display_id": display_id} if display_id else None
        publish_display_data(data, metadata, transient=transient, update=update)

    def clear(self, wait: bool) -> None:
        """Clear the cell."""
        from IPython.display import clear_output

        clear_output(wait)


def present_screen(places: Mapping[int, str] | None = None) -> Screen:
    """The notebook's cell when this process is a Jupyter kernel, else the terminal.

    Args:
        places: The machine of each rank, where there is more than one.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return NotebookScreen(places) if shell is not None and hasattr(shell, "kernel") else TerminalScreen(places)


def labelled(text: str, rank: int | None, places: Mapping[int, str] | None = None) -> str:
    """Whole lines with the rank in front of each, and its machine where that is known."""
    if rank is None:
        return text
    owner = f"[rank {rank}, {places[rank]}]" if places and rank in places else f"[rank {rank}]"
    return "".join(f"{owner} {line}\n" for line in text.removesuffix("\n").split("\n"))


def heading(ranks: Sequence[int]) -> dict[str, Any]:
    """A mime bundle that says whose displays follow."""
    name = name_ranks(ranks)
    return {"text/plain": f"{name}:", "text/html": f"<b>{name}</b>"}


class RankOutput:
    """Puts the output of one run on the screen.

    Args:
        screen: Where it appears.
        run_id: The run, for the names of displays.
        label: Tell the screen whose output it is; off for a pool of one rank.
    """

    def __init__(self, screen: Screen, run_id: int, *, label: bool = True) -> None:
        self._screen, self._run_id, self._label = screen, run_id, label
        self._open: dict[tuple[int, StreamName], str] = {}
        self._shown: dict[int, int] = {}
        self._cut: dict[int, int] = {}
        self._full: set[tuple[int, StreamName]] = set()
        self._live_since: float | None = None
        self._live_id: str | None = None
        self._live_text = ""
        self._values: dict[int, Display] = {}
        self._gathered: dict[int, list[Stream | Display]] = {}
        self._gathering_since = 0.0

    def feed(self, rank: int, items: Iterable[Stream | Display]) -> None:
        """Take what a rank put out; it is shown within GATHER_S."""
        if not self._gathered:
            self._gathering_since = time.monotonic()
        self._gathered.setdefault(rank, []).extend(items)
        self.tick()

    def tick(self) -> None:
        """Show what has been gathered for long enough. To be called a few times a second."""
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
        """Show what is still open: unfinished lines, the last expressions, and how much was left out."""
        self._show_gathered()
        for rank, _ in sorted(self._open):
            self._close_lines(rank)
        self._update_live()
        for rank, count in sorted(self._cut.items()):
            self._screen.text("stderr", f"... {count:,} more characters of output are not shown\n", self._named(rank))
        self._show_values()

    def _feed_text(self, rank: int, item: Stream) -> None:
        key, text = (rank, item.name), item.text
        if key in self._full:
            dropped, newline, text = text.partition("\n")
            self._cut[rank] += len(dropped)
            if not newline:
                return
            self._full.discard(key)
            text = newline + text
        text = self._open.pop(key, "") + text
        body, newline, rest = text.rpartition("\n")
        if newline:
            self._show_lines(rank, item.name, body + "\n")
        if rest:
            self._open[key] = self._bounded(key, _settled(rest))

    def _bounded(self, key: tuple[int, StreamName], line: str) -> str:
        """An unfinished line up to a length; what comes after it, up to the line's end, is counted."""
        if len(line) < LIMIT_CHARS:
            return line
        self._full.add(key)
        self._cut[key[0]] = self._cut.get(key[0], 0) + len(line) - LIMIT_CHARS // 2
        return line[: LIMIT_CHARS // 2]

    def _show_lines(self, rank: int, name: StreamName, text: str) -> None:
        text = "".join(f"{_overwritten(line)}\n" for line in text[:-1].split("\n"))
        room = LIMIT_CHARS - self._shown.get(rank, 0)
        if len(text) > room:
            self._cut[rank] = self._cut.get(rank, 0) + len(text) - max(room, 0)
            text = text[: max(room, 0)]
            if not text:
                return
            text = text if text.endswith("\n") else text + "\n"
        self._shown[rank] = self._shown.get(rank, 0) + len(text)
        self._screen.text(name, text, self._named(rank))

    def _close_lines(self, rank: int) -> None:
        for name in ("stdout", "stderr"):
            self._full.discard((rank, name))
            text = self._open.pop((rank, name), "")
            if text:
                self._show_lines(rank, name, text + "\n")

    def _feed_display(self, rank: int, item: Display) -> None:
        if item.action == "clear":
            self._screen.clear(item.wait)
            return
        display_id = f"labkit-{self._run_id}-{rank}-{item.display_id}" if item.display_id else None
        self._screen.display(item.data, item.metadata, display_id, item.action == "update", self._named(rank))

    def _update_live(self) -> None:
        """Show unfinished lines in a display of their own once they have stood for a moment."""
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
        """Show the cell's last expression on each rank; equal displays once, with all their ranks."""
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
    """What a terminal shows of a line with carriage returns in it."""
    if "\r" not in line:
        return line
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown


def _end_of(line: str) -> str:
    return line if len(line) <= LIVE_CHARS else f"...{line[-LIVE_CHARS:]}"


def _settled(line: str) -> str:
    """The unfinished line without what carriage returns have overwritten: a progress bar of hours stays one line long."""
    head, returned, tail = line.rpartition("\r")
    return f"{_overwritten(head)}\r{tail}" if returned else line
