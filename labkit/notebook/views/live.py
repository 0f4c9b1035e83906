"""Views that change while a reader looks at them, and leave a complete notebook when they end.

A view is one display of standard HTML and text, which is updated in place; the saved notebook keeps its last state. Widgets add
what needs a kernel, and disappear when the view ends. So a notebook that is reopened without its kernel has no dead widget, and
papermill, nbconvert and GitHub show what the reader saw.
"""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labkit.controller.current import open_pool
from labkit.controller.output import present_screen

if TYPE_CHECKING:
    from ipywidgets import Widget


def widgets_work() -> bool:
    """Return whether this process is a Jupyter kernel with ipywidgets installed."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel") and importlib.util.find_spec("ipywidgets") is not None


def person_watches() -> bool:
    """Return whether the running cell was sent by a frontend that can ask for input; papermill and nbclient cannot."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython is not None else None
    return bool(getattr(kernel, "_allow_stdin", False))


def end_with_pool(end: Callable[[], None]) -> None:
    """Call ``end`` after the cell that closes the present pool, usually a notebook's last cell. Do nothing without a pool.

    A notebook that is saved after that has no widget without a kernel.
    """
    shell, pool = sys.modules["IPython"].get_ipython(), open_pool()
    if pool is None:
        return

    def after_cell(result: object) -> None:
        if pool.closed:
            shell.events.unregister("post_run_cell", after_cell)
            end()

    shell.events.register("post_run_cell", after_cell)


class LiveDisplay:
    """One display in a cell's output; a terminal shows its first text. Any thread may change it, even after the cell has ended."""

    def __init__(self) -> None:
        self._id = f"labkit-{uuid.uuid4().hex[:12]}"
        self._shown: dict[str, Any] | None = None

    def show(self, text: str, html: str | None = None) -> None:
        """Show HTML if the page can, else text. Empty text shows nothing."""
        self._publish({"text/plain": text} | ({"text/html": html} if html is not None else {}))

    def show_bundle(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show a mime bundle."""
        self._publish(data, metadata)

    def show_widget(self, widget: Widget, text: str = "", html: str = "") -> None:
        """Show a widget, together with HTML and text for pages that draw no widgets."""
        data = dict(widget._repr_mimebundle_() or {})
        self._publish(data | {"text/plain": text, "text/html": html})

    def clear(self) -> None:
        """Show nothing, but keep the place."""
        if self._shown is not None:
            self.show("", "")

    def _publish(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        if data != self._shown:
            present_screen().display(data, metadata or {}, self._id, update=self._shown is not None)
            self._shown = data
