"""A picture with sliders and menus, which is drawn again when the reader moves one of them.

The picture is a separate display in plain HTML and PNG, and the saved notebook keeps its last state. The controls are widgets
beside it, for people only: papermill, nbconvert and printed pages show the picture for the initial values. The controls disappear
when the pool is closed, and appear again when the cell is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from labkit.errors import LabkitError
from labkit.notebook.views.live import LiveDisplay, end_with_pool, person_watches, widgets_work


@dataclass(frozen=True)
class FreeText:
    """A control for free text, empty at first.

    Attributes:
        hint: The text shown in it while it is empty.
    """

    hint: str = ""


Options = Sequence[Any] | Callable[..., Sequence[Any]] | FreeText

_LABEL_WIDTH = "9em"
_UNITS = {"mib": "(MiB)", "gib": "(GiB)", "s": "(s)"}


class Shown(Protocol):
    """An object that can be drawn, such as a `labkit.notebook.drawing.style.Picture`."""

    def _repr_mimebundle_(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]: ...


class ControlError(LabkitError, ValueError):
    """A control has no such option, or no options at all."""


class Choices:
    """The options of each control, and the chosen values.

    Args:
        controls: For each name, the options in order, or a function that returns them. The function gets the values of the controls
            before it, by name.
        start: The initial values of some controls; the others start from their first option.

    Raises:
        ControlError: A control has no options, or an initial value is not one of its options.
    """

    def __init__(self, controls: Mapping[str, Options], start: Mapping[str, Any] | None = None) -> None:
        self._controls = dict(controls)
        self.texts = {name: control for name, control in controls.items() if isinstance(control, FreeText)}
        self.options: dict[str, list[Any]] = {}
        self.values: dict[str, Any] = {}
        wanted = dict(start or {})
        if strays := set(wanted) - set(controls):
            raise ControlError(f"no control is called {', '.join(sorted(strays))}; there are {', '.join(controls)}")
        self._settle(wanted)
        for name, value in wanted.items():
            if self.values[name] != value:
                raise ControlError(f"{name} starts from {value!r}, which is not one of its options: {self.options[name]}")

    def choose(self, name: str, value: Any) -> None:
        """Choose an option. Controls whose options depend on it keep their value if it is still an option.

        Raises:
            ControlError: The control has no such option.
        """
        if name not in self.texts and value not in self.options[name]:
            raise ControlError(f"{name} has no option {value!r}; it has {self.options[name]}")
        self._settle(self.values | {name: value})

    def _settle(self, wanted: Mapping[str, Any]) -> None:
        self.options, self.values = {}, {}
        for name, options in self._controls.items():
            if isinstance(options, FreeText):
                self.options[name], self.values[name] = [], str(wanted.get(name, ""))
                continue
            offered = list(options(**self.values) if callable(options) else options)
            if not offered:
                raise ControlError(f"{name} has no options")
            self.options[name] = offered
            self.values[name] = wanted[name] if wanted.get(name) in offered else offered[0]


class Explorer:
    """The controls and the picture in a cell's output.

    Args:
        draw: Called with the value of each control by name; returns the object to show.
        choices: The controls.
    """

    def __init__(self, draw: Callable[..., Shown], choices: Choices) -> None:
        self._draw, self._choices = draw, choices
        self._controls, self._picture = LiveDisplay(), LiveDisplay()
        self._widgets: dict[str, Any] = {}
        self._box: Any = None
        self._moving = False

    def show(self) -> None:
        """Show the picture, and above it the controls if a person can move them."""
        if widgets_work() and person_watches():
            self._show_controls()
        self.update()

    def update(self) -> None:
        """Draw the picture for the present values."""
        data, metadata = self._draw(**self._choices.values)._repr_mimebundle_()
        self._picture.show_bundle(dict(data), dict(metadata))

    def end(self) -> None:
        """Remove the controls and leave the picture as it is."""
        self._controls.clear()
        for widget in self._widgets.values():
            widget.close()
        self._widgets = {}

    def _show_controls(self) -> None:
        import ipywidgets as widgets

        for name in self._choices.values:
            self._widgets[name] = self._control(name)
            self._widgets[name].observe(lambda change, name=name: self._moved(name, change["new"]), "value")
        self._box = widgets.VBox(list(self._widgets.values()))
        self._controls.show_widget(self._box)
        end_with_pool(self.end)

    def _control(self, name: str) -> Any:
        import ipywidgets as widgets

        options = self._choices.options[name]
        common = {
            "description": " ".join(_UNITS.get(word, word) for word in name.split("_")),
            "value": self._choices.values[name],
            "style": {"description_width": _LABEL_WIDTH},
            "layout": {"width": "32em", "max_width": "100%"},
        }
        if (text := self._choices.texts.get(name)) is not None:
            return widgets.Text(placeholder=text.hint, continuous_update=False, **common)
        # A slider shows the order of numbers, and like a menu it responds to the arrow keys.
        if all(isinstance(option, int | float) for option in options):
            return widgets.SelectionSlider(options=options, continuous_update=False, **common)
        return widgets.Dropdown(options=options, **common)

    def _moved(self, name: str, value: Any) -> None:
        if self._moving or value is None:
            return
        self._choices.choose(name, value)
        self._moving = True  # the changes that follow are not the reader's choices
        try:
            for other, widget in self._widgets.items():
                if other not in self._choices.texts and tuple(widget.options) != tuple(self._choices.options[other]):
                    widget.options = self._choices.options[other]
                widget.value = self._choices.values[other]
        finally:
            self._moving = False
        try:
            self.update()
        except Exception as error:  # no running cell could show it
            self._picture.show(f"{type(error).__name__}: {error}")


def explore(draw: Callable[..., Shown], controls: Mapping[str, Options], start: Mapping[str, Any] | None = None) -> None:
    """Show a picture with controls: a slider for options that are numbers, a menu for others, a line for free text.

    If no person watches, there is only the picture, for the initial values.

    Args:
        draw: Called with the value of each control by name; returns the picture, or any object with a mime bundle. It runs in the
            notebook's own process, between cells.
        controls: As for `Choices`.
        start: As for `Choices`.

    Raises:
        ControlError: A control has no options, or an initial value is not one of its options.

    Ranks: controller.
    """
    Explorer(draw, Choices(controls, start)).show()
