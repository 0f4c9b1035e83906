"""Views that change while they are looked at, made so that nothing depends on their staying alive.

A view is one display of standard HTML and text, which is updated in place and stands in the saved notebook as it was last.
Widgets come on top of it: they show what a page without a kernel cannot, and go when the view has ended. So a notebook that is
reopened without its kernel holds no dead widget, and papermill, nbconvert and GitHub show what the reader saw.
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
    """Whether this process is a Jupyter kernel with ipywidgets beside it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel") and importlib.util.find_spec("ipywidgets") is not None


def person_watches() -> bool:
    """Whether the running cell was sent by a frontend that can ask for input; papermill and nbclient cannot."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython is not None else None
    return bool(getattr(kernel, "_allow_stdin", False))


def end_with_pool(end: Callable[[], None]) -> None:
    """Call ``end`` after the cell in which the present pool is closed, as a notebook's last cell does; never when there is none.

    So what is saved then holds no widget that nothing stands behind any more.
    """
    shell, pool = sys.modules["IPython"].get_ipython(), open_pool()
    if pool is None:
        return

    def after_cell(result: object) -> None:
        if pool.closed:
            shell.events.unregister("post_run_cell", after_cell)
            end()

    shell.events.register("post_run_cell", after_cell)


class Place:
    """One display in a cell's output; a terminal shows its first text. Any thread may change it, also when the cell has ended."""

    def __init__(self) -> None:
        self._id = f"labkit-{uuid.uuid4().hex[:12]}"
        self._shown: dict[str, Any] | None = None

    def show(self, text: str, html: str | None = None) -> None:
        """Show HTML where a page can, else text. Empty text shows nothing."""
        self._publish({"text/plain": text} | ({"text/html": html} if html is not None else {}))

    def show_bundle(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show a mime bundle."""
        self._publish(data, metadata)

    def show_widget(self, widget: Widget, text: str = "", html: str = "") -> None:
        """Show a widget; HTML and text stand beside it for pages that draw no widgets."""
        data = dict(widget._repr_mimebundle_() or {})
        self._publish(data | {"text/plain": text, "text/html": html})

    def clear(self) -> None:
        """Show nothing, and keep the place."""
        if self._shown is not None:
            self.show("", "")

    def _publish(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        if data != self._shown:
            present_screen().display(data, metadata or {}, self._id, update=self._shown is not None)
            self._shown = data
