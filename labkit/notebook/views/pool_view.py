"""``%pool`` in a notebook: the table of the ranks, with buttons to update it once or every second."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from labkit.controller.pool import WorkerPool
from labkit.notebook.views.live import LiveDisplay, widgets_work
from labkit.notebook.views.pool_status import rank_statuses, status_html, status_text

if TYPE_CHECKING:
    from ipywidgets import Widget

FOLLOW_EVERY_S = 1.0


class PoolView:
    """The status of a pool in a cell's output.

    The table is standard HTML and stays in the saved notebook. While the pool is open it has two buttons: *Look again*, and
    *Follow*, which looks once a second from a separate thread, also while other cells run. Buttons react between cells only.

    Args:
        pool: An open pool.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._table, self._buttons = LiveDisplay(), LiveDisplay()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._widgets: list[Any] = []

    def show(self) -> None:
        """Show the table, and the buttons if widgets work."""
        self.look()
        if widgets_work():
            self._buttons.show_widget(self._make_buttons())

    def look(self) -> None:
        """Update the table. Any thread may call this."""
        if self._pool.closed:
            text = f"WorkerPool(world_size={self._pool.world_size}, device={self._pool.device!r}): closed"
            self._table.show(text)
            return
        statuses = rank_statuses(self._pool)
        self._table.show(status_text(self._pool, statuses), status_html(self._pool, statuses))

    def follow(self) -> None:
        """Look once a second until `stop`, or until the pool is closed."""
        self.stop()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, args=(self._end,), name="labkit-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking. Blocks until the present look is over, for at most 5 s."""
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._thread = None

    def end(self) -> None:
        """Remove the buttons and leave the table as it is."""
        self.stop()
        self._buttons.clear()
        for widget in self._widgets:
            widget.close()
        self._widgets = []

    @property
    def following(self) -> bool:
        """True if it looks once a second."""
        return self._thread is not None

    @property
    def pool_closed(self) -> bool:
        """True if its pool has been closed."""
        return self._pool.closed

    def _follow(self, end: threading.Event) -> None:
        while not end.wait(FOLLOW_EVERY_S) and not self._pool.closed:
            self.look()

    def _make_buttons(self) -> Widget:
        import ipywidgets as widgets

        again = widgets.Button(description="Look again", tooltip="Look at every rank once more")
        follow = widgets.ToggleButton(description="Follow", tooltip="Look once a second, also while other cells run")
        again.on_click(lambda _: self.look())
        follow.observe(lambda change: self.follow() if change["new"] else self.stop(), "value")
        row = widgets.HBox([again, follow])
        self._widgets = [again, follow, row]
        return row


_views: list[PoolView] = []


def show_status(pool: WorkerPool, *, follow: bool = False) -> None:
    """Show a pool's status in the running cell. An earlier view stays as a table without buttons.

    Args:
        pool: An open pool.
        follow: Update it once a second, also while later cells run.

    Ranks: controller.
    """
    end_views()
    view = PoolView(pool)
    view.show()
    _views.append(view)
    if follow:
        view.follow()


def end_views(*_: Any, only_closed: bool = False) -> None:
    """End the views, or only those whose pool is closed. A saved notebook must not hold dead buttons."""
    for view in list(_views):
        if view.pool_closed or not only_closed:
            _views.remove(view)
            view.end()


def register(shell: Any) -> None:
    """Show pools as tables, and end their views when they have been closed. A second call changes nothing."""
    formatter = shell.display_formatter.formatters["text/html"]
    formatter.for_type(WorkerPool, _pool_html)
    if _after_cell not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _after_cell)


def _pool_html(pool: WorkerPool) -> str | None:
    return None if pool.closed else status_html(pool, rank_statuses(pool))


def _after_cell(result: Any) -> None:
    end_views(only_closed=True)
    for view in _views:
        if view.following:
            view.look()  # its last state may be outdated, and the pool may end before the next look
