"""A checkpoint's contents in transit to another checkpoint: tensors with their sources, and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from labkit.checkpoint.contents.sources import Source
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FQNMismatchError,
    IncompleteCheckpointError,
    UnsupportedTensorError,
)
from labkit.checkpoint.index.model import Checkpoint, Path_, Section, ValueEntry, unsupported
from labkit.checkpoint.index.names import flat_key
from labkit.checkpoint.pickles import safe_pickle
from labkit.checkpoint.pickles.pickle_records import QUANTIZED
from labkit.checkpoint.wording import counted, listed


@dataclass(frozen=True)
class OutTensor:
    """A tensor to write."""

    path: Path_
    source: Source
    section: Section

    @cached_property
    def key(self) -> str:
        return flat_key(self.path)


@dataclass(frozen=True)
class OutValue:
    """A value to write: plain data, or an archive in the source that is copied byte for byte.

    Attributes:
        path: The nested keys.
        section: Optimizer or other.
        value: Plain data; None if ``entry`` is set and has not been read.
        entry: Where the value is in the source; None once the value has been changed.
    """

    path: Path_
    section: Section
    value: Any = None
    entry: ValueEntry | None = None

    @cached_property
    def key(self) -> str:
        return flat_key(self.path)


@dataclass
class Contents:
    """Everything to write, in order.

    Attributes:
        checkpoint: The source of the contents.
        tensors, values: The entries.
        notes: Sentences for the user about decisions made on the way.
        idle_drops: The drop patterns that match nothing in the checkpoint.
    """

    checkpoint: Checkpoint
    tensors: list[OutTensor] = field(default_factory=list)
    values: list[OutValue] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    idle_drops: list[str] = field(default_factory=list)

    @property
    def items(self) -> list[OutTensor | OutValue]:
        """All entries, tensors first."""
        return [*self.tensors, *self.values]

    def note_idle(self, kind: str, patterns: Iterable[str], matches: Callable[[str], bool]) -> None:
        """Note the patterns that match nothing: they are usually typos."""
        self.notes.extend(f"the {kind} pattern {pattern!r} matches nothing" for pattern in patterns if not matches(pattern))

    def check_unique(self) -> None:
        """Raise :class:`FQNMismatchError` if two entries have the same key."""
        keys = Counter([item.key for item in self.tensors] + [item.key for item in self.values])
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            raise FQNMismatchError(
                self.checkpoint.path,
                unexpected=[f"two entries get the name {key}" for key in twice],
                advice="Give one of them another name with a rename rule.",
            )


def top_level(item: OutTensor | OutValue) -> str:
    """Return the top-level key of an entry, or ``.`` for a tensor outside any dict."""
    return "." if len(item.path) == 1 and isinstance(item, OutTensor) else str(item.path[0])


def left_out(items: Iterable[OutTensor | OutValue]) -> str:
    """Summarise entries in words, by top-level key: ``optimizer (64 tensors, 9 values), epoch (1 value)``."""
    counts: dict[str, list[int]] = {}
    for item in items:
        counts.setdefault(top_level(item), [0, 0])[isinstance(item, OutValue)] += 1
    texts = []
    for name, (tensors, values) in counts.items():
        numbers = [counted(tensors, "tensor")] * (tensors > 0) + [counted(values, "value")] * (values > 0)
        texts.append(f"{name} ({', '.join(numbers)})")
    return listed(texts, most=8)


def refuse_unsupported(contents: Contents, *, advice: str) -> None:
    """Raise :class:`UnsupportedTensorError` if there are tensors that labkit does not read, with their names."""
    found = {item.key: what for item in contents.values if item.entry and (what := unsupported(item.entry))}
    found |= {item.key: f"quantized tensor {item.source.dtype}" for item in contents.tensors if item.source.dtype in QUANTIZED}
    if found:
        names = listed([f"{key} ({what})" for key, what in found.items()])
        raise UnsupportedTensorError(contents.checkpoint.path, f"{names}. {advice}")


def read_values(contents: Contents, wanted: Iterable[OutValue], *, drop_advice: str) -> Mapping[str, Any]:
    """Return the plain data of values, by key.

    Raises:
        IncompleteCheckpointError, CorruptCheckpointError: A value's file is missing, cut off or damaged.
        CheckpointError: A value holds something that labkit does not rebuild; the message names its key.
    """
    result: dict[str, Any] = {}
    with Reader(contents.checkpoint) as reader:
        for item in wanted:
            if item.entry is None:
                result[item.key] = item.value
                continue
            path = contents.checkpoint.root / item.entry.file
            try:
                if item.entry.length:
                    result[item.key] = reader.value(item.entry.key)
                else:
                    result[item.key] = safe_pickle.plain(item.entry.inline, path)
            except (IncompleteCheckpointError, CorruptCheckpointError):
                raise  # the error is about the file, not about this value
            except CheckpointError as error:
                raise CheckpointError(f"{item.key}: {str(error).rstrip('.')}. {drop_advice}") from None
    return result


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size
