"""Short descriptions of values that are not tensors; only small ones are read."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.errors import CheckpointFormatError
from labkit.checkpoint.index.model import Checkpoint, ValueEntry
from labkit.checkpoint.pickles import safe_pickle
from labkit.checkpoint.pickles.pickle_records import UnsupportedTensor
from labkit.checkpoint.wording import counted

SMALL_BYTES = 1 << 16
_MOST_ITEMS = 20
_MOST_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class SmallValue:
    """A value, or the reason why it was not read.

    Attributes:
        entry: The entry of the value.
        content: The value, with inert records in place of whatever is not plain data.
        asks_for: Names in its pickle outside the allow-list. None of them was run.
        unread: The reason why it was not read; empty if it was.
    """

    entry: ValueEntry
    content: Any = None
    asks_for: tuple[str, ...] = ()
    unread: str = ""

    @property
    def text(self) -> str:
        """A description in a few words."""
        if self.asks_for:
            return f"asks for {', '.join(self.asks_for)}, not run"
        if isinstance(self.content, UnsupportedTensor):
            return f"not supported: {self.content.what}"
        return f"{self.unread}, not read" if self.unread else short(self.content)


def small_values(checkpoint: Checkpoint, entries: Iterable[ValueEntry]) -> Iterator[SmallValue]:
    """Read a checkpoint's values of up to 64 KiB each. Ranks: local. Runs nothing, and reads no tensor."""
    with Reader(checkpoint) as reader:
        for entry in entries:
            if entry.length > SMALL_BYTES:
                yield SmallValue(entry, unread=counted(entry.length, "byte"))
                continue
            try:
                content, asks_for = reader.stored(entry)
            except CheckpointFormatError as error:
                yield SmallValue(entry, unread=error.reason.removesuffix("."))
                continue
            try:
                content = safe_pickle.plain(content, checkpoint.root / entry.file, tensor=lambda reference: reference)
            except CheckpointFormatError:
                pass  # content then keeps the records
            yield SmallValue(entry, content, asks_for)


class _Short(reprlib.Repr):
    """A repr limited to a few levels and items, because a file of a few bytes may hold a list of 2**60 items."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _MOST_ITEMS
        self.maxstring = self.maxlong = self.maxother = _MOST_CHARACTERS

    repr_OrderedDict = reprlib.Repr.repr_dict  # noqa: N815 -- named after the class

    def repr_Stateful(self, value: object, level: int) -> str:  # noqa: N802 -- as above
        return "<record>"

    def repr_int(self, value: int, level: int) -> str:
        return f"an int of {value.bit_length():,} bits" if value.bit_length() > 1024 else super().repr_int(value, level)


def short(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) > _MOST_ITEMS:
        return f"{type(value).__name__} of {len(value)} items"
    text = _Short().repr(value)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
