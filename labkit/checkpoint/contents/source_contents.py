"""Selection of a checkpoint's contents to copy: some are left out, then the copies in rank files are compared."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches

from labkit.checkpoint.contents.contents import Contents, OutTensor, OutValue, left_out, top_level
from labkit.checkpoint.contents.sources import EntrySource
from labkit.checkpoint.contents.trainer_shards import refuse_shards
from labkit.checkpoint.data.rank_copies import Copies, roots_of_each_rank
from labkit.checkpoint.errors import FQNMismatchError, IncompleteCheckpointError
from labkit.checkpoint.index.held import also_in
from labkit.checkpoint.index.model import Checkpoint, ChunkTable, Path_, TensorEntry
from labkit.checkpoint.wording import listed, quoted


def contents_of(
    checkpoint: Checkpoint, *, copies: Copies = "refuse", only: Sequence[str] = (), drop: Sequence[str] = ()
) -> Contents:
    """Return a checkpoint's contents unchanged, without those that the caller leaves out.

    Entries that belong to neither model nor optimizer and differ between rank files are keyed by rank (``rng.rank_0...``), as in
    :class:`labkit.checkpoint.PerRank`.

    Args:
        checkpoint: An opened checkpoint.
        copies: What to do if rank files hold different copies of a model's or optimizer's tensor (such as unsynchronised buffers):
            refuse, or take the first rank's.
        only: Top-level keys to keep, with ``.`` for tensors outside any dict; by default everything.
        drop: Patterns of keys to leave out, matched against keys as stored and as keyed by rank.

    Raises:
        IncompleteCheckpointError: A file of the checkpoint is missing.
        FQNMismatchError: It lacks a top-level key in ``only``.
        RankDivergenceError: Such copies differ and ``copies`` is ``refuse``, or entries with the same name in several rank files
            are not copies.

    Ranks: local. Reads the copies of replicated tensors.
    """
    for name in checkpoint.files:
        if not (checkpoint.root / name).is_file():
            raise IncompleteCheckpointError(
                checkpoint.root / name,
                "the checkpoint names this file, but it is missing",
                **({"advice": f"{there}, or use an earlier checkpoint."} if (there := also_in(checkpoint.root, name)) else {}),
            )
    contents = Contents(checkpoint)
    contents.tensors = [OutTensor(entry.path, EntrySource(entry), entry.section) for entry in checkpoint.tensors.values()]
    contents.values = [OutValue(value.path, value.section, entry=value) for value in checkpoint.values.values()]
    every = [item.key for item in contents.items]
    _keep_only(contents, only)
    _drop(contents, drop)
    part = _part(checkpoint, contents)
    refuse_shards(checkpoint, part)
    _key_by_rank(contents, roots_of_each_rank(part, copies, contents.notes))
    every += [item.key for item in contents.items]
    _drop(contents, drop)
    contents.idle_drops = [pattern for pattern in drop if not fnmatch.filter(every, pattern)]
    return contents


def near_key(contents: Contents, pattern: str) -> str:
    """Return a hint with the key most similar to a pattern; an empty string if none is similar."""
    keys = [*contents.checkpoint.tensors, *contents.checkpoint.values]
    heads = [f"{key.split('.', 1)[0]}.*" for key in keys if "." in key]
    near = get_close_matches(pattern, dict.fromkeys([*heads, *keys]), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _part(checkpoint: Checkpoint, contents: Contents) -> Checkpoint:
    keys = {item.key for item in contents.items}
    return replace(
        checkpoint,
        tensors={key: entry for key, entry in checkpoint.tensors.items() if key in keys},
        values={key: value for key, value in checkpoint.values.items() if key in keys},
    )


def _keep_only(contents: Contents, only: Sequence[str]) -> None:
    if not only:
        return
    heads = sorted({top_level(item) for item in contents.items})
    strange = [name for name in only if name not in heads]
    if strange:
        near = {name: get_close_matches(name, heads, 1) for name in strange}
        keys = listed([quoted(head) for head in heads], most=12)
        raise FQNMismatchError(
            contents.checkpoint.path,
            missing=[name + (f" (did you mean {near[name][0]}?)" if near[name] else "") for name in strange],
            advice=f"Its top-level keys are {keys}; '.' means the tensors that are in no dict.",
        )
    left = left_out(item for item in contents.items if top_level(item) not in only)
    contents.tensors = [item for item in contents.tensors if top_level(item) in only]
    contents.values = [item for item in contents.values if top_level(item) in only]
    if left:
        contents.notes.append(f"left out, since it is not in only: {left}")


def _drop(contents: Contents, patterns: Sequence[str]) -> None:
    def kept(key: str) -> bool:
        return not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)

    contents.tensors = [item for item in contents.tensors if kept(item.key)]
    contents.values = [item for item in contents.values if kept(item.key)]


def _key_by_rank(contents: Contents, roots: set[str]) -> None:
    """Split the entries under these top-level keys into one per rank, keyed by rank."""
    tensors: list[OutTensor] = []
    for item in contents.tensors:
        assert isinstance(item.source, EntrySource)
        entry = item.source.entry
        if str(item.path[0]) not in roots:
            tensors.append(item)
            continue
        for path, table in keyed_by_rank(contents.checkpoint, entry):
            tensors.append(OutTensor(path, EntrySource(entry, table), entry.section))
    values: list[OutValue] = []
    for value in contents.values:
        assert value.entry is not None
        if str(value.path[0]) not in roots or not value.entry.replicas:
            values.append(value)
            continue
        for rank, inline in sorted(value.entry.replicas.items()):
            copy = replace(value.entry, inline=inline, replicas={})
            values.append(OutValue(_ranked(value.path, rank), value.section, entry=copy))
    contents.tensors, contents.values = tensors, values


def keyed_by_rank(checkpoint: Checkpoint, entry: TensorEntry) -> Iterator[tuple[Path_, ChunkTable]]:
    """Yield, for each rank's copy of a tensor, its path after a migration and its chunks."""
    for table in (entry.chunks, *entry.replicas):
        yield _ranked(entry.path, checkpoint.ranks[table.files[0]]), table


def _ranked(path: Path_, rank: int) -> Path_:
    return (path[0], f"rank_{rank}", *path[1:])
