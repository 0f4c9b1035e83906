"""What stands for objects in a pickle that is read without running it."""

from __future__ import annotations

from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any


class Stateful(list[dict[str, Any]]):
    """A record of a class that occurs by the million: a list whose one item is the state."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class Class:
    """A class that a pickle names. Calling it makes a :class:`Record`; nothing of the class itself is run.

    Attributes:
        module, qualname: Its name.
        opaque: Whether it is outside the allow-list.
    """

    __slots__ = ("module", "opaque", "qualname")

    def __init__(self, module: str, qualname: str, *, opaque: bool) -> None:
        self.module, self.qualname, self.opaque = module, qualname, opaque

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Record:
    """An object of a class, as its arguments, its state and its items only. Keys and values in turn are items too."""

    __slots__ = ("args", "items", "kind", "state")

    def __init__(self, kind: Class, args: tuple[Any, ...]) -> None:
        self.kind, self.args = kind, args
        self.state: dict[str, Any] = {}
        self.items: list[Any] = []

    @property
    def name(self) -> str:
        return self.kind.name

    def set_state(self, state: Any) -> None:
        """Take the state that a pickle sets, once: what a second one does to the first depends on the class."""
        if self.state:
            raise UnpicklingError(f"it sets the state of a {self.name} twice")
        # Slotted dataclasses and enums pickle (dict, slots); everything else that torch writes pickles one dict.
        if isinstance(state, tuple) and len(state) == 2 and all(part is None or isinstance(part, dict) for part in state):
            state = {**(state[0] or {}), **(state[1] or {})}
        self.state = state if isinstance(state, dict) else {"state": state}

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Function:
    """A function of this package that a pickle may call. It has no attributes that a pickle could set."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
