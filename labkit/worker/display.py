"""Rich display on a rank: mime bundles go out through the rank's output, as a notebook's kernel would publish them."""

from __future__ import annotations

from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from labkit.wire.messages import Display
from labkit.worker.capture import Emit
from labkit.worker.widgets import WidgetTexts


class RankDisplayPublisher(DisplayPublisher):
    """Sends what ``display(...)`` publishes."""

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
    """Keeps the last expression's value and display; the run sends them when the cell is done."""

    widgets: WidgetTexts | None = None
    value: Any = None
    shown: Display | None = None
    source: str = ""

    def quiet(self) -> bool:
        """Whether the cell ends with a semicolon, which silences its last expression."""
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
        """Set ``_``, unless a cell has set it, as IPython does. Not ``__`` and ``_7``: they would keep large values alive."""
        assert self.shell is not None
        names = self.shell.user_ns
        if names.get("_") is self._:
            names["_"] = self._ = result

    def take(self) -> tuple[Any, Display | None]:
        """The last value and its display; both are forgotten here, so that the value's memory can go."""
        value, shown = self.value, self.shown
        self.value = self.shown = None
        return value, shown


def encode(data: dict[str, Any]) -> dict[str, Any]:
    """A bundle with binary images as base64 text, as Jupyter's messages want them."""
    from base64 import b64encode

    return {mime: b64encode(value).decode("ascii") if isinstance(value, bytes) else value for mime, value in data.items()}
