"""A checkpoint's contents on their way into another one: tensors with sources, and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from labkit.checkpoint import safe_pickle
from labkit.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FQNMismatchError,
    IncompleteCheckpointError,
    RankDivergenceError,
    UnsupportedTensorError,
)
from labkit.checkpoint.model import Checkpoint, Path_, Section, TensorEntry, ValueEntry, unsupported
from labkit.checkpoint.names import flat_key
from labkit.checkpoint.pickle_records import QUANTIZED
from labkit.checkpoint.read import Reader, same_bits
from labkit.checkpoint.sections import is_moment_piece
from labkit.checkpoint.sources import EntrySource, Source
from labkit.checkpoint.wording import listed

Copies = Literal["refuse", "first"]


@dataclass(frozen=True)
class OutTensor:
    """A tensor to write."""

    path: Path_
    source: Source
    section: Section

    @property
    def key(self) -> str:
        return flat_key(self.path)


@dataclass(frozen=True)
class OutValue:
    """A value to write: plain data, or the archive in the source that holds it, to be copied byte for byte.

    Attributes:
        path: The nested keys.
        section: Optimizer or other.
        value: Plain data; None when ``entry`` is there and has not been read.
        entry: The value's place in the source, as long as nothing has changed it.
    """

    path: Path_
    section: Section
    value: Any = None
    entry: ValueEntry | None = None

    @property
    def key(self) -> str:
        return flat_key(self.path)


@dataclass
class Contents:
    """Everything to write, in order.

    Attributes:
        checkpoint: Where it comes from.
        tensors, values: The entries.
        notes: Sentences for the user about what was decided on the way.
    """

    checkpoint: Checkpoint
    tensors: list[OutTensor] = field(default_factory=list)
    values: list[OutValue] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note_idle(self, kind: str, patterns: Iterable[str], matches: Callable[[str], bool]) -> None:
        """Note the patterns that match nothing: that is mostly a slip of the pen."""
        self.notes.extend(f"the {kind} pattern {pattern!r} matches nothing" for pattern in patterns if not matches(pattern))

    def check_unique(self) -> None:
        """Raise :class:`FQNMismatchError` when two entries have one key."""
        keys = Counter([item.key for item in self.tensors] + [item.key for item in self.values])
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            raise FQNMismatchError(
                self.checkpoint.path,
                unexpected=[f"two entries get the name {key}" for key in twice],
                advice="Give one of them another name with a rename rule.",
            )


def contents_of(checkpoint: Checkpoint, *, copies: Copies = "refuse") -> Contents:
    """A checkpoint's contents as they are.

    What differs from rank file to rank file is keyed by rank (``rng.rank_0...``) where it belongs to neither model nor
    optimizer, as :class:`labkit.checkpoint.PerRank` does.

    Args:
        checkpoint: An opened checkpoint.
        copies: What to do when the copies of a model's or optimizer's tensor in several rank files differ (buffers that
            are not synchronised): refuse, or take the first rank's.

    Raises:
        IncompleteCheckpointError: A file of the checkpoint is missing.
        RankDivergenceError: Such copies differ and ``copies`` is ``refuse``.

    Ranks: local. Reads the copies of replicated tensors.
    """
    for name in checkpoint.files:
        if not (checkpoint.root / name).is_file():
            raise IncompleteCheckpointError(
                checkpoint.root / name,
                "the checkpoint names this file, and it is missing. Copy it from where it was saved, or use an earlier checkpoint.",
            )
    result = Contents(checkpoint)
    per_rank = _per_rank_roots(checkpoint, copies, result.notes)
    for entry in checkpoint.tensors.values():
        if str(entry.path[0]) in per_rank:
            tables = (entry.chunks, *entry.replicas)
            for rank, table in enumerate(tables):
                result.tensors.append(OutTensor(_ranked(entry.path, rank), EntrySource(entry, table), entry.section))
        else:
            result.tensors.append(OutTensor(entry.path, EntrySource(entry), entry.section))
    for value in checkpoint.values.values():
        if str(value.path[0]) in per_rank and value.replicas:
            for rank, inline in sorted(value.replicas.items()):
                copy = replace(value, inline=inline, replicas={})
                result.values.append(OutValue(_ranked(value.path, rank), value.section, entry=copy))
        else:
            result.values.append(OutValue(value.path, value.section, entry=value))
    return result


def refuse_unsupported(contents: Contents, *, advice: str) -> None:
    """Raise :class:`UnsupportedTensorError` with the names of tensors that labkit does not read, where there are any."""
    found = {item.key: what for item in contents.values if item.entry and (what := unsupported(item.entry))}
    found |= {item.key: f"quantized tensor {item.source.dtype}" for item in contents.tensors if item.source.dtype in QUANTIZED}
    if found:
        names = listed([f"{key} ({what})" for key, what in found.items()])
        raise UnsupportedTensorError(contents.checkpoint.path, f"{names}. {advice}")


def _ranked(path: Path_, rank: int) -> Path_:
    return (path[0], f"rank_{rank}", *path[1:])


def _per_rank_roots(checkpoint: Checkpoint, copies: Copies, notes: list[str]) -> set[str]:
    roots: set[str] = set()
    differing: list[str] = []
    with Reader(checkpoint, checksums=True) as reader:
        for entry in checkpoint.tensors.values():
            if entry.replicas and not is_moment_piece(entry) and not copies_agree(reader, entry):
                if entry.section == "other":
                    roots.add(str(entry.path[0]))
                else:
                    differing.append(entry.key)
        for value in checkpoint.values.values():
            plain = {rank: _comparable(inline) for rank, inline in value.replicas.items()}
            if len(set(plain.values())) > 1:
                if value.section == "other":
                    roots.add(str(value.path[0]))
                else:
                    differing.append(value.key)
    if differing and copies == "refuse":
        raise RankDivergenceError(
            checkpoint.path,
            [f"{key} differs between the rank files" for key in differing],
            advice="To take the first rank's, if they are meant to be equal, pass copies='first' (--copies first).",
        )
    notes.extend(f"{key} differs between the rank files; the first rank's is taken" for key in differing)
    notes.extend(f"{root} differs between the rank files and is keyed by rank" for root in sorted(roots))
    return roots


def copies_agree(reader: Reader, entry: TensorEntry) -> bool:
    """Whether the copies of a tensor in further rank files have the same bits as the first."""
    for table in entry.replicas:
        for chunk in table:
            if not same_bits(reader.box(entry, chunk.offsets, chunk.sizes), reader.box(entry, chunk.offsets, chunk.sizes, table)):
                return False
    return True


def _comparable(value: Any) -> str:
    try:
        return repr(safe_pickle.plain(value, "a value"))
    except CheckpointError:
        return repr(value)


def read_values(contents: Contents, wanted: Iterable[OutValue], *, drop_advice: str) -> Mapping[str, Any]:
    """The plain data of values, by key.

    Raises:
        IncompleteCheckpointError, CorruptCheckpointError: The file that holds a value is missing, cut off or damaged.
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
                raise  # of the file, and not of this value
            except CheckpointError as error:
                raise CheckpointError(f"{item.key}: {error}. {drop_advice}") from None
    return result


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a tensor."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size
