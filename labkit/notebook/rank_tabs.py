"""``%%spmd --tabs``: what the ranks put out, one tab for each, ranks with equal output in one.

While the cell runs the tabs are a widget. When it ends, tabs in plain HTML take its place: they need no kernel, take the keyboard
(arrow keys, as all radio buttons do), show everything when they are printed, and stand as they are in the saved notebook.
"""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from labkit.notebook.live import Place, widgets_work
from labkit.notebook.rank_items import Item, RankItems, items_html, tabs_html, tabs_text

if TYPE_CHECKING:
    from ipywidgets import HTML, Tab

UPDATE_EVERY_S = 0.25
# Of a long output the end is shown while it grows; all of it when the cell has ended.
LIVE_CHARS = 20_000
_LINE = re.compile(r"\[rank (\d+)\] (.*)", re.DOTALL)
_HEADING = re.compile(r"rank (\d+):")
_OWN_DISPLAY = re.compile(r"labkit-\d+-(\d+)-")


# While the cell runs -------------------------------------------------------------------------------------------------


class TabsView:
    """Tabs in a cell's output: a widget while the cell runs, then HTML."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.items = RankItems(ranks)
        # Ranks' output comes through the main thread, and late updates from a timer.
        self.lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._place = Place()
        self._tab: Tab | None = None
        self._panes: dict[int, HTML] = {}
        self._updated = 0.0

    def changed(self) -> None:
        """Show what is new, a few times a second at most; what comes too soon is shown a moment later."""
        if self._timer is not None or not widgets_work():
            return
        if (early := self._updated + UPDATE_EVERY_S - time.monotonic()) <= 0:
            self._update()
            return
        self._timer = threading.Timer(early, self._late)
        self._timer.daemon = True
        self._timer.start()

    def _late(self) -> None:
        with self.lock:
            if self._timer is not None:
                self._timer = None
                self._update()

    def _update(self) -> None:
        self._updated = time.monotonic()
        if self._tab is None:
            self._show_widget()
        for rank, pane in self._panes.items():
            value = items_html([*self.items.by_rank[rank][-20:-1], *map(_end_of, self.items.by_rank[rank][-1:])])
            if pane.value != value:
                pane.value = value

    def finish(self) -> None:
        """Put HTML in the widget's place."""
        with self.lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if self.items.groups():
            self._place.show(tabs_text(self.items), tabs_html(self.items))
        else:
            self._place.clear()
        if self._tab is not None:
            for pane in self._panes.values():
                pane.close()
            self._tab.close()

    def _show_widget(self) -> None:
        import ipywidgets as widgets

        self._panes = {rank: widgets.HTML() for rank in self.items.by_rank}
        self._tab = widgets.Tab(children=list(self._panes.values()), titles=[f"rank {rank}" for rank in self._panes])
        self._place.show_widget(self._tab)


def _end_of(item: Item) -> Item:
    return item if item.data is not None or len(item.text) <= LIVE_CHARS else Item(f"...{item.text[-LIVE_CHARS:]}")


class _Lines(io.TextIOBase):
    """Takes the ranks' lines out of a stream and hands everything else on."""

    def __init__(self, view: TabsView, original: Any) -> None:
        self._view, self._original = view, original

    def writable(self) -> bool:
        """It is there to be written to."""
        return True

    def write(self, text: str) -> int:
        """Sort the lines."""
        with self._view.lock:
            for line in text.splitlines(keepends=True):
                if found := _LINE.match(line):
                    self._view.items.add_text(int(found[1]), found[2])
                else:
                    self._original.write(line)
            self._view.changed()
        return len(text)

    def flush(self) -> None:
        """Flush the stream behind it."""
        self._original.flush()


class _Publisher:
    """Takes the ranks' displays and hands everything else on to the shell's publisher."""

    def __init__(self, view: TabsView, original: Any) -> None:
        self._view, self._original = view, original
        self._heading: int | None = None

    def publish(self, data: dict[str, Any], metadata: dict[str, Any] | None = None, **more: Any) -> None:
        """See IPython's DisplayPublisher."""
        with self._view.lock:
            display_id = (more.get("transient") or {}).get("display_id")
            update = bool(more.get("update"))
            rank, self._heading = self._heading, None
            if rank is None and display_id and (owner := _OWN_DISPLAY.match(display_id)):
                rank = int(owner[1])
            if rank is not None:
                self._view.items.add_display(rank, data, display_id, update)
                self._view.changed()
            elif set(data) == {"text/plain", "text/html"} and (found := _HEADING.fullmatch(data["text/plain"])):
                self._heading = int(found[1])
            else:
                self._original.publish(data, metadata, **more)

    def clear_output(self, wait: bool = False) -> None:
        """Forget what the ranks have put out."""
        self._view.items.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextmanager
def in_tabs(shell: Any, ranks: Sequence[int]) -> Iterator[None]:
    """While the block runs, show what the ranks put out in tabs.

    Ranks: controller.

    Args:
        shell: The notebook's shell.
        ranks: The ranks that run; each gets a tab.
    """
    view = TabsView(ranks)
    streams, publisher = (sys.stdout, sys.stderr), shell.display_pub
    shell.display_pub = _Publisher(view, publisher)
    sys.stdout, sys.stderr = (_Lines(view, stream) for stream in streams)
    try:
        yield
    finally:
        (sys.stdout, sys.stderr), shell.display_pub = streams, publisher
        view.finish()
