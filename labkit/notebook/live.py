"""Views that change while they are looked at, made so that nothing depends on their staying alive.

A view is one display of standard HTML and text, which is updated in place and stands in the saved notebook as it was last.
Widgets come on top of it: they show what a page without a kernel cannot, and go when the view has ended. So a notebook that is
reopened without its kernel holds no dead widget, and papermill, nbconvert and GitHub show what the reader saw.
"""

from __future__ import annotations

import importlib.util
import sys
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipywidgets import Widget


def widgets_work() -> bool:
    """Whether this process is a Jupyter kernel with ipywidgets beside it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel") and importlib.util.find_spec("ipywidgets") is not None


class Place:
    """One display in a cell's output. Any thread may change what it shows, also when its cell has ended."""

    def __init__(self) -> None:
        self._id = f"labkit-{uuid.uuid4().hex[:12]}"
        self._shown: dict[str, Any] | None = None

    def show(self, text: str, html: str | None = None) -> None:
        """Show HTML where a page can, else text. Empty text shows nothing."""
        self._publish({"text/plain": text} | ({"text/html": html} if html is not None else {}))

    def show_widget(self, widget: Widget, text: str = "", html: str = "") -> None:
        """Show a widget; HTML and text stand beside it for pages that draw no widgets."""
        data = dict(widget._repr_mimebundle_() or {})
        self._publish(data | {"text/plain": text, "text/html": html})

    def clear(self) -> None:
        """Show nothing, and keep the place."""
        if self._shown is not None:
            self.show("", "")

    def _publish(self, data: dict[str, Any]) -> None:
        from IPython.display import publish_display_data

        if data != self._shown:
            publish_display_data(data, {}, transient={"display_id": self._id}, update=self._shown is not None)
            self._shown = data
