"""``%%spmd --tabs``: one tab for the output of each rank; ranks with equal output share one.

While the cell runs, the tabs are a widget. When it ends, tabs in plain HTML replace it: they need no kernel, work with the keyboard
(arrow keys, as all radio buttons do), show everything when they are printed, and stay in the saved notebook.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from labkit.controller.output import Screen, present_screen
from labkit.notebook.views.live import LiveDisplay, widgets_work
from labkit.notebook.views.rank_items import Item, RankItems, items_html, tabs_html, tabs_text

if TYPE_CHECKING:
    from ipywidgets import HTML, Tab

    from labkit.wire.messages import StreamName

UPDATE_EVERY_S = 0.25
# While a long output grows, only its end is shown; all of it is shown when the cell has ended.
LIVE_CHARS = 20_000


# While the cell runs -------------------------------------------------------------------------------------------------


class TabsView:
    """Tabs in a cell's output: a widget while the cell runs, then HTML."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.items = RankItems(ranks)
        # Output of the ranks comes from the main thread, and late updates from a timer.
        self.lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._place = LiveDisplay()
        self._tab: Tab | None = None
        self._panes: dict[int, HTML] = {}
        self._updated = 0.0

    def changed(self) -> None:
        """Show what is new, a few times a second at most; a change that comes too soon is shown a moment later."""
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
        """Replace the widget by HTML."""
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


class _TabsScreen:
    """A screen that puts each rank's output into its tab, and passes everything else to the screen behind it."""

    def __init__(self, view: TabsView, behind: Screen) -> None:
        self._view, self._behind = view, behind

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        """Put a rank's lines into its tab."""
        if rank is None:
            self._behind.text(name, text)
            return
        with self._view.lock:
            self._view.items.add_text(rank, text)
            self._view.changed()

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        """Put a rank's display into its tab."""
        if rank is None:
            self._behind.display(data, metadata, display_id, update)
            return
        with self._view.lock:
            self._view.items.add_display(rank, data, display_id, update)
            self._view.changed()

    def clear(self, wait: bool, rank: int | None = None) -> None:
        """Forget the rank's output. The view is updated only after a moment, so ``wait`` makes no difference."""
        with self._view.lock:
            self._view.items.clear(rank)
            self._view.changed()


@contextmanager
def in_tabs(ranks: Sequence[int]) -> Iterator[Screen]:
    """Show the output of each rank in a separate tab until the block ends, and yield the screen to write to.

    Ranks: controller.

    Args:
        ranks: The ranks that run; each gets a tab.
    """
    view = TabsView(ranks)
    try:
        yield _TabsScreen(view, present_screen())
    finally:
        view.finish()
