"""Widgets on a rank. No page can reach them, so their text is shown, and updated while they change.

A page looks for a widget's model in the notebook's kernel and shows an error if it does not find it. A text at least shows the
progress of a widget: for tqdm.notebook it is the bar that tqdm writes in a terminal.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import comm
from comm.base_comm import BaseComm

from labkit.wire.messages import Display
from labkit.worker.run.capture import Emit

VIEW = "application/vnd.jupyter.widget-view+json"
EVERY_S = 0.2
_TOLD = (
    "A widget on a rank is shown as text, because no page can reach it. Make controls in a cell without %%spmd, and send their "
    "values with pool.push.\n"
)


class WidgetTexts:
    """The widgets that this rank displays.

    Args:
        emit: The function that sends what the rank displays.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._shown: dict[str, tuple[Any, str]] = {}
        self._changed: dict[str, str] = {}
        self._last = 0.0
        self._told = False
        comm.create_comm = lambda *args, **kwargs: _RankComm(self, *args, **kwargs)

    def as_text(self, data: dict[str, Any], display_id: str | None) -> tuple[dict[str, Any], str | None]:
        """Return a bundle that a page can show, and the name of its display. A widget's display gets a name, to be updated by."""
        if VIEW not in data:
            return data, display_id
        if not self._told:
            self._told = True
            sys.stderr.write(_TOLD)
        model_id = data[VIEW]["model_id"]
        display_id = display_id or f"widget-{model_id}"
        widget = sys.modules["ipywidgets"].Widget.widgets.get(model_id)
        text = _text_of(widget) or str(data.get("text/plain", ""))
        self._shown[display_id] = widget, text
        return {"text/plain": text}, display_id

    def refresh(self) -> None:
        """Show what has changed, a few times a second at most."""
        for display_id, (widget, before) in self._shown.items():
            text = _text_of(widget)
            if text and text != before:
                self._shown[display_id] = widget, text
                self._changed[display_id] = text
        if time.monotonic() - self._last >= EVERY_S:
            self.finish()

    def finish(self) -> None:
        """Show what has changed, now."""
        self._last = time.monotonic()
        changed, self._changed = self._changed, {}
        for display_id, text in changed.items():
            self._emit(Display("update", {"text/plain": text}, {}, display_id))

    def forget(self) -> None:
        """Forget the widgets after a cell has ended: its displays stay as they are."""
        self.finish()
        self._shown.clear()


def _text_of(widget: Any) -> str:
    with contextlib.suppress(Exception):  # tqdm's bar dies before its widget
        return repr(widget)
    return ""


class _RankComm(BaseComm):
    """The channel of a widget, with no other end."""

    def __init__(self, texts: WidgetTexts, *args: Any, **kwargs: Any) -> None:
        self._texts = texts
        super().__init__(*args, **kwargs)

    def publish_msg(self, msg_type: str, *args: Any, **kwargs: Any) -> None:
        """Look at a widget's text when its state changes."""
        if msg_type == "comm_msg":
            self._texts.refresh()
