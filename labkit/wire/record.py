"""The base of the small frozen dataclasses that travel in messages."""

from __future__ import annotations

from typing import Any, ClassVar, Self


class WireRecord:
    """A record that is pickled as its class and its fields, in half the time that a frozen dataclass with slots takes."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__match_args__])
