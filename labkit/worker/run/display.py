"""Rich display on a rank: mime bundles are sent with the rank's output, as a notebook's kernel would publish them."""

from __future__ import annotations

from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from labkit.wire.messages import Display
from labkit.worker.run.capture import Emit
from labkit.worker.run.widgets import WidgetTexts


class RankDisplayPublisher(DisplayPublisher):
    """A publisher that sends what ``display(...)`` publishes."""

    emit: Emit | None = None
    widgets: WidgetTexts | None = None

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send one bundle; see :class:`IPython.core.displaypub.DisplayPublisher`."""
        if self.emit is not None and self.widgets is not None:
            data, display_id = self.widgets.as_text(data, (transient or {}).get("display_id"))
            self.emit(Display("update" if update else "display", encode(data), dict(metadata or {}), display_id))

    def clear_output(self, wait: bool = False) -> None:
        """Clear this rank's output in the cell."""
        if self.emit is not None:
            self.emit(Display("clear", wait=wait))


class RankDisplayHook(DisplayHook):
    """A display hook that keeps the last expression's value and display. The run sends them when the cell is done."""

    widgets: WidgetTexts | None = None
    value: Any = None
    shown: Display | None = None
    source: str = ""

    def quiet(self) -> bool:
        """Return whether the cell ends with a semicolon, which suppresses the display of its last expression."""
        return bool(self.semicolon_at_end_of_expression(self.source))

    def __call__(self, result: Any = None) -> None:
        """Receive the value of an expression statement at the end of a cell."""
        if result is None or self.quiet():
            return
        self._keep_as_underscore(result)
        data, metadata = self.compute_format_data(result)
        if self.widgets is not None:
            data, _ = self.widgets.as_text(data, None)
        self.value, self.shown = result, Display("value", encode(data), dict(metadata))

    def _keep_as_underscore(self, result: Any) -> None:
        """Set ``_`` as IPython does, unless a cell has set it. Do not set ``__`` and ``_7``: they would keep large values alive."""
        assert self.shell is not None
        names = self.shell.user_ns
        if names.get("_") is self._:
            names["_"] = self._ = result

    def take(self) -> tuple[Any, Display | None]:
        """Return the last value and its display. Both are forgotten here, so that the value's memory can be freed."""
        value, shown = self.value, self.shown
        self.value = self.shown = None
        return value, shown


def encode(data: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle with binary images as base64 text, as Jupyter's messages need them."""
    from base64 import b64encode

    return {mime: b64encode(value).decode("ascii") if isinstance(value, bytes) else value for mime, value in data.items()}
