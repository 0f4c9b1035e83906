"""Decision on how several torch.save files form one checkpoint, based on their contents and the numbers in their names.

| the files | are |
| --- | --- |
| the caller names them by a pattern with ``{rank}`` | the files of these ranks |
| no tensor is in two files, and values that are in several files are equal | parts of one state; \
:mod:`labkit.checkpoint.formats.counted_names` detects missing ones |
| each holds tensors that say which rank wrote them (DTensor, ShardedTensor), all say different ranks, the names differ only in \
that number | the files of those ranks |
| all hold the same entries, weights among them, and these are equal except for ranks' own entries \
(:mod:`labkit.checkpoint.formats.own_entries`) and shares of numbered moments; and the names differ in one number, by which no \
more ranks are missing than present | the files of the ranks that this number gives |
| anything else: two numbers differ, an entry differs or is only in some files, no weights are in common | undecided: ask |

Numbers are compared as numbers. Words such as ``rank`` or ``epoch`` decide nothing. Equal weights do not prove that files were
saved together, since weights may be frozen: a number that differs may be a rank's own (``rank``) or show that these are two
checkpoints (``epoch``). Here tensors are compared by length, torch's checksum and first bytes; a migration later compares them bit
for bit. A numbered moment is a share rather than a copy if its length differs between files, or matches no weight.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from labkit.checkpoint.errors import AmbiguousCheckpointError, CheckpointError, CheckpointFormatError
from labkit.checkpoint.files.plain_files import open_regular
from labkit.checkpoint.formats.counted_names import MOST_RANKS, rank_pattern
from labkit.checkpoint.formats.own_entries import own_entries, shares_of
from labkit.checkpoint.index.model import Checkpoint, Chunk, ChunkTable, Path_, TensorEntry, ValueEntry
from labkit.checkpoint.index.sections import classify
from labkit.checkpoint.pickles import safe_pickle
from labkit.checkpoint.pickles.values import digest
from labkit.checkpoint.wording import listed, quoted

_NUMBER = re.compile(r"[0-9]+")
_COMPARED_BYTES = 1 << 12


@dataclass(slots=True)
class Found:
    """One tensor in one file: its chunks, and whether they are a part (a shard) or the whole."""

    path: Path_
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk]
    sharded: bool
    storages: frozenset[str]


@dataclass(slots=True)
class RankFile:
    """The content of one torch.save file.

    Attributes:
        name: Its name, relative to the checkpoint's root.
        tensors, values: Its entries by key.
        opaque: Names outside the allow-list that were left unread.
        records: Its storages as (start, length, CRC-32), by start.
        writers: The ranks that wrote its tensors, as recorded in the tensors themselves (torch does so in sharded tensors).
        world_size: The minimum number of ranks that the tensors imply.
    """

    name: str
    tensors: dict[str, Found] = field(default_factory=dict)
    values: dict[str, tuple[Path_, Any]] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()
    records: list[tuple[int, int, int]] = field(default_factory=list)
    writers: set[int] = field(default_factory=set)
    world_size: int = 0


def ranks_of(files: Sequence[RankFile], root: Path, told: Mapping[str, int] | None, *, together: bool) -> dict[str, int] | None:
    """Decide, by this module's table, which rank wrote each file.

    Args:
        files: The files of a directory that may be one checkpoint.
        root: The directory.
        told: File name to rank, if the caller gave it.
        together: Whether the caller said that the files belong to one checkpoint; if not, a number that differs in the names may be
            a step.

    Returns:
        File name to rank; None if the files are parts of one state.

    Raises:
        AmbiguousCheckpointError: It cannot be decided, or the files contradict what the caller said.

    Ranks: local. Reads the first bytes of tensors that several files hold.
    """
    if told is not None:
        _refuse_contradiction(files, root, told)
        return dict(told)
    if len(files) == 1:
        return {files[0].name: next(iter(files[0].writers))} if len(files[0].writers) == 1 else None
    if not any(found.sharded for file in files for found in file.tensors.values()) and _are_parts(files):
        return None
    if all(len(file.writers) == 1 for file in files):
        return _by_content(files, root, together=together)
    if any(file.writers for file in files):
        raise _undecided(files, root, "not each of them says which one rank wrote it")
    return _by_equal_weights(files, root)


def _refuse_contradiction(files: Sequence[RankFile], root: Path, told: Mapping[str, int]) -> None:
    said = {file.name: next(iter(file.writers)) for file in files if len(file.writers) == 1}
    wrong = [name for name, rank in said.items() if told[name] != rank]
    if wrong and len(set(said.values())) == len(files):  # ranks within replica groups occur in several files and prove nothing
        name = wrong[0]
        raise _undecided(files, root, f"{name} says that rank {said[name]} wrote it, but the path gives it rank {told[name]}")


def missing_ranks(path: object, ranks: Collection[int], world_size: int = 0) -> tuple[int, ...]:
    """Return the ranks that have no file, out of ``world_size`` ranks or more if a file's rank is higher.

    Raises:
        CheckpointFormatError: There would be implausibly many ranks.
    """
    world_size = max(world_size, *(rank + 1 for rank in ranks))
    if world_size > MOST_RANKS:
        raise CheckpointFormatError(path, f"its names or contents imply {world_size:,} ranks. Name one file.")
    return tuple(sorted(set(range(world_size)).difference(ranks)))


def _are_parts(files: Sequence[RankFile]) -> bool:
    seen: set[str] = set()
    values: dict[str, Any] = {}
    for file in files:
        if seen & file.tensors.keys() or seen & file.values.keys():
            return False
        seen |= file.tensors.keys()
        for key, (_, value) in file.values.items():
            if key in file.tensors or (key in values and not _same_value(values[key], value)):
                return False
            values[key] = value
    return not seen & values.keys()


def _by_content(files: Sequence[RankFile], root: Path, *, together: bool) -> dict[str, int]:
    ranks = {file.name: next(iter(file.writers)) for file in files}
    if len(set(ranks.values())) < len(files):
        raise _undecided(files, root, "several of them say that they were written by the same rank")
    if not together:
        for place, column in enumerate(_columns(files)):
            if len(set(column)) > 1 and column != list(ranks.values()):
                raise _undecided(
                    files, root, f"their names differ in number {place + 1}, which is not the rank that they say wrote them"
                )
    return ranks


def _by_equal_weights(files: Sequence[RankFile], root: Path) -> dict[str, int]:
    if len({_NUMBER.sub("", file.name) for file in files}) > 1:
        raise _undecided(files, root, "their names differ in more than numbers")
    differing = [column for column in _columns(files) if len(set(column)) > 1]
    if len(differing) != 1 or len(set(differing[0])) < len(files):
        raise _undecided(files, root, f"their names differ in {len(differing)} numbers")
    if max(differing[0]) >= MOST_RANKS:
        raise _undecided(files, root, f"{max(differing[0])} is too large for a rank")
    if max(differing[0]) + 1 > 2 * len(files):
        raise _undecided(files, root, f"as ranks, most of those up to {max(differing[0])} would be missing")
    numbers = {file.name: number for file, number in zip(files, differing[0], strict=True)}
    why = _different_moments(files, root, numbers)
    if why:
        raise _undecided(files, root, why)
    return numbers


def _columns(files: Sequence[RankFile]) -> list[list[int]]:
    """Return the numbers in the names: one list for each position, with one number for each file."""
    return [list(column) for column in zip(*([int(n) for n in _NUMBER.findall(file.name)] for file in files), strict=True)]


def _different_moments(files: Sequence[RankFile], root: Path, numbers: Mapping[str, int]) -> str:
    """Return why the files may be several checkpoints; an empty text if they are copies of one, except for ranks' own entries.

    Args:
        files: The files.
        root: Their directory.
        numbers: File name to the number that may be its rank.
    """
    contents = [_classified(file, root) for file in files]
    shares, numbered = shares_of(contents)
    compared: list[dict[str, str]] = []
    for file, content in zip(files, contents, strict=True):
        entries: list[TensorEntry | ValueEntry] = [*content.tensors.values(), *content.values.values()]
        left = own_entries(content, numbers[file.name]) | shares | numbered
        compared.append({entry.key: str(entry.path[0]) for entry in entries if entry.key not in left})
    first, prints = files[0], _prints(root, files[0], compared[0].keys())
    for file, keys in zip(files[1:], compared[1:], strict=True):
        for one, other, name in ((keys, compared[0], file.name), (compared[0], keys, first.name)):
            alone = [key for key in one if key not in other]
            heads = set(other.values())
            more = dict.fromkeys(one[key] if one[key] not in heads else key for key in alone)
            if more:
                return f"only {name} holds {listed(list(more))}"
        differing = [
            key
            for key in keys.keys() & file.values.keys()
            if key not in first.values or not _same_value(first.values[key][1], file.values[key][1])
        ]
        differing += [key for key, print_ in _prints(root, file, keys.keys()).items() if print_ != prints.get(key)]
        if differing:
            return f"{min(differing)} differs between {first.name} and {file.name}"
        dark = [key for key in keys.keys() & file.values.keys() if not _is_plain(file.values[key][1])]
        if dark:
            return f"{min(dark)} is not plain data, so it is unknown whether it differs"
    weights = any(entry.key in compared[0] for entry in contents[0].section("model"))
    return "" if weights else "they have no weights in common to show that they are from one moment"


def _classified(file: RankFile, root: Path) -> Checkpoint:
    content = Checkpoint(root, root, "torch")
    for key, found in file.tensors.items():
        content.tensors[key] = TensorEntry(key, found.path, found.shape, found.dtype, ChunkTable.of([], len(found.shape)))
    for key, (path, value) in file.values.items():
        content.values[key] = ValueEntry(key, path, file.name, inline=value)
    classify(content)
    return content


def _prints(root: Path, file: RankFile, keys: Set[str]) -> dict[str, Any]:
    """Return, for each tensor of a file, data that are equal for equal tensors: place in the storage, checksum, first bytes."""
    result: dict[str, Any] = {}
    with open_regular(root / file.name) as data:
        for key in keys & file.tensors.keys():
            found = file.tensors[key]
            prints: list[Any] = [found.shape, found.dtype]
            for chunk in found.chunks:
                start, length, crc = file.records[bisect_right(file.records, (chunk.start, 1 << 62, 0)) - 1]
                data.seek(chunk.start)
                prints.append(
                    (chunk.start - start, length, crc, chunk.strides, chunk.lazy, data.read(min(chunk.length, _COMPARED_BYTES)))
                )
            result[key] = prints
    return result


def _is_plain(value: Any) -> bool:
    try:
        safe_pickle.plain(value, "a value")
    except CheckpointError:
        return False
    return True


def _same_value(left: Any, right: Any) -> bool:
    try:
        return digest(safe_pickle.plain(left, "a value")) == digest(safe_pickle.plain(right, "a value"))
    except (CheckpointError, TypeError, LookupError):
        return repr(left) == repr(right)


def _undecided(files: Sequence[RankFile], root: Path, why: str) -> AmbiguousCheckpointError:
    patterns = [str(root / pattern) for pattern in _patterns(files)]
    said = [*(writer for file in files for writer in file.writers)]
    if not patterns and len(set(said)) == len(said) == len(files) and len({_NUMBER.sub("*", file.name) for file in files}) == 1:
        patterns = [str(root / _NUMBER.sub("*", files[0].name))]  # a path without {rank} takes the ranks from the files
    way = f"say where the rank is in their names: {listed([quoted(pattern) for pattern in patterns])}"
    if not patterns:
        way = "rename them, or link them in one folder, so that their names differ only in the rank, as 'rank_0.pt' and so on"
    elif "{" not in patterns[0]:
        way = f"take the ranks from the files themselves: {quoted(patterns[0])}"
    return AmbiguousCheckpointError(
        root,
        f"{len(files)} files may be {len(files)} checkpoints or the ranks' files of one, and {why}",
        [*(str(root / file.name) for file in files[:8]), *patterns],
        advice=f"Name one file; or, if they are the files of ranks, {way}.",
    )


def _patterns(files: Sequence[RankFile]) -> list[str]:
    """Return the patterns with the rank in place of one number that cover several files and contradict none of them."""
    covered: dict[str, list[tuple[RankFile, int]]] = {}
    for file in files:
        for match in _NUMBER.finditer(file.name):
            pattern = f"{file.name[: match.start()]}{{rank}}{file.name[match.end() :]}"
            covered.setdefault(pattern, []).append((file, int(match[0])))
    found = []
    for same in covered.values():
        spelled = rank_pattern([file.name for file, _ in same]) if len(same) > 1 else None
        if spelled is not None and all(file.writers <= {number - ("{rank+1}" in spelled)} for file, number in same):
            found.append(spelled)
    return found[:4]
