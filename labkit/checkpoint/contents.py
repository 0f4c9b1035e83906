"""A checkpoint's contents on their way into another checkpoint: tensors with sources, and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from labkit.checkpoint.values import digest
from labkit.checkpoint.wording import counted, listed
from labkit.ranks import format_ranks

Copies = Literal["refuse", "first"]


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
    """A value to write: plain data, or an archive in the source, to be copied byte for byte.

    Attributes:
        path: The nested keys.
        section: Optimizer or other.
        value: Plain data; None if ``entry`` is set and has not been read.
        entry: The value's place in the source, unless something has changed the value.
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
    """

    checkpoint: Checkpoint
    tensors: list[OutTensor] = field(default_factory=list)
    values: list[OutValue] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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


def contents_of(checkpoint: Checkpoint, *, copies: Copies = "refuse") -> Contents:
    """Return a checkpoint's contents unchanged.

    Entries that differ between rank files and belong to neither model nor optimizer are keyed by rank (``rng.rank_0...``), as
    :class:`labkit.checkpoint.PerRank` does.

    Args:
        checkpoint: An opened checkpoint.
        copies: What to do if several rank files hold different copies of a model's or optimizer's tensor (buffers that are
            not synchronised): refuse, or take the first rank's.

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
            for table in (entry.chunks, *entry.replicas):
                rank = checkpoint.ranks[table.files[0]]
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


def top_level(item: OutTensor | OutValue) -> str:
    """Return the top-level key of an entry; a dot for a tensor that is in no dict."""
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
    """Raise :class:`UnsupportedTensorError` with the names of tensors that labkit does not read, if there are any."""
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
    _refuse_unplaced_shards(checkpoint)
    with Reader(checkpoint, checksums=True) as reader:
        for entry in checkpoint.tensors.values():
            if entry.replicas and not is_moment_piece(entry) and not copies_agree(reader, entry):
                if entry.section == "other":
                    roots.add(str(entry.path[0]))
                else:
                    differing.append(f"{entry.key}: {_camps(checkpoint, reader, entry)}")
        for value in checkpoint.values.values():
            plain = {rank: _comparable(inline) for rank, inline in value.replicas.items()}
            if len(set(plain.values())) > 1:
                if value.section == "other":
                    roots.add(str(value.path[0]))
                else:
                    differing.append(f"{value.key} differs between the files of ranks {format_ranks(sorted(plain))}")
    if differing and copies == "refuse":
        raise RankDivergenceError(
            checkpoint.path,
            differing,
            advice="To take the first rank's, if they are meant to be equal, pass copies='first' (--copies first).",
        )
    notes.extend(f"{text}; the first rank's is taken" for text in differing)
    notes.extend(f"{root} differs between the rank files and is keyed by rank" for root in sorted(roots))
    return roots


def _refuse_unplaced_shards(checkpoint: Checkpoint) -> None:
    """Raise :class:`RankDivergenceError` if a tensor's shape differs between the ranks' files, so that these hold no copies."""
    problems = []
    for entry in checkpoint.tensors.values():
        if entry.section == "other" or is_moment_piece(entry) or len(entry.chunks) != 1:
            continue
        for table in entry.replicas:
            if len(table) == 1 and tuple(table[0].sizes) != entry.chunks[0].sizes:
                shapes = ["x".join(map(str, one.sizes)) for one in (entry.chunks[0], table[0])]
                files = entry.chunks.files[0], table.files[0]
                problems.append(f"{entry.key} is {shapes[0]} in {files[0]} and {shapes[1]} in {files[1]}")
                break
    if problems:
        raise RankDivergenceError(
            checkpoint.path,
            problems,
            advice="They are shards of one tensor, or of several, and no file says where they lie in it, as DTensors would. "
            "labkit does not put them together: save them as DTensors, or join them in the program that cut them.",
        )


def _camps(checkpoint: Checkpoint, reader: Reader, entry: TensorEntry) -> str:
    """Name the first file whose copy of a tensor differs."""
    other = next(
        table
        for table in entry.replicas
        for chunk in table
        if not same_bits(reader.box(entry, chunk.offsets, chunk.sizes), reader.box(entry, chunk.offsets, chunk.sizes, table))
    )
    return f"{entry.chunks.files[0]} and {other.files[0]} hold different values"


def copies_agree(reader: Reader, entry: TensorEntry) -> bool:
    """Return whether the copies of a tensor in further rank files have the same bits as the first."""
    for table in entry.replicas:
        for chunk in table:
            if not same_bits(reader.box(entry, chunk.offsets, chunk.sizes), reader.box(entry, chunk.offsets, chunk.sizes, table)):
                return False
    return True


def _comparable(value: Any) -> bytes:
    try:
        return digest(safe_pickle.plain(value, "a value"))
    except (CheckpointError, TypeError, LookupError):  # something that save() never writes, such as a date in a foreign file
        return repr(value).encode()


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
                raise  # the error is about the file and not about this value
            except CheckpointError as error:
                raise CheckpointError(f"{item.key}: {str(error).rstrip('.')}. {drop_advice}") from None
    return result


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size
