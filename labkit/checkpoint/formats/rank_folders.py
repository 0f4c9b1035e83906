"""Search for patterns for ranks' files spread over several folders, one per node: ``node*/ckpt_rank_{rank}.pt``.

A pattern is offered only if it matches exactly these files. With ``{rank}``, it must give each file a different rank, and not
contradict a file that says which rank wrote it. Without ``{rank}``, each file itself must say a different rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.formats.patterns import matching_files
from labkit.checkpoint.formats.torch_format import read_torch
from labkit.checkpoint.wording import counted, quoted

_NUMBER = re.compile(r"[0-9]+")
_MOST_READ = 64


def rank_folders(root: Path, folders: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Return a sentence on how to name ranks' files in several folders by one path; an empty string if no files look like that.

    Args:
        root: The directory of the folders.
        folders: For each folder, the files of each checkpoint in it.

    Ranks: local. Reads the index of up to 64 files of one name.
    """
    alike: dict[str, list[str]] = {}
    for folder, parts in folders.items():
        for name in (name for names in parts for name in names):
            alike.setdefault(_NUMBER.sub("*", f"{folder}/{name}"), []).append(f"{folder}/{name}")
    groups = [paths for paths in alike.values() if len({path.partition("/")[0] for path in paths}) > 1]
    writers = {path: _writer(root / path) for paths in groups for path in (paths if len(paths) <= _MOST_READ else ())}
    found = [pattern for paths in groups for pattern in _patterns(root, paths, writers)]
    if found:
        return f" If their files are those of ranks, write {' or '.join(quoted(root / pattern) for pattern in found[:4])}."
    if len(alike) != 1 or not groups or len(groups[0]) == len(folders):
        return ""
    return (
        f" If their {counted(len(groups[0]), 'file')} are those of ranks, no pattern tells them apart: rename them, or link them "
        "in one folder, under numbers of their own, such as 'rank_0.pt'."
    )


def _patterns(root: Path, paths: Sequence[str], writers: Mapping[str, int | None]) -> Iterator[str]:
    told: list[dict[str, int]] = []
    columns = list(zip(*([int(number) for number in _NUMBER.findall(path)] for path in paths), strict=True))
    for place in reversed(range(len(columns))):
        column = columns[place]
        if len(set(column)) < len(paths) or max(column) + 1 > 2 * len(paths):
            continue
        from_one = sorted(column) == list(range(1, len(paths) + 1))
        ranks = {path: number - from_one for path, number in zip(paths, column, strict=True)}
        pattern = _with_stars(paths[0], columns, place, "{rank+1}" if from_one else "{rank}")
        right = all(writers.get(path) in (None, rank) for path, rank in ranks.items())
        if right and ranks not in told and _matches(root, pattern, paths, ranks):
            told.append(ranks)
            yield pattern
    said = {writers.get(path) for path in paths}
    pattern = _with_stars(paths[0], columns)
    if not told and None not in said and len(said) == len(paths) and _matches(root, pattern, paths, None):
        yield pattern


def _with_stars(path: str, columns: Sequence[Sequence[int]], place: int = -1, text: str = "") -> str:
    """Return a path with one of its numbers replaced by a text, and the others that differ by ``*``."""
    texts = [text if at == place else "*" if len(set(column)) > 1 else None for at, column in enumerate(columns)]
    pieces = re.split("([0-9]+)", path)
    return "".join(piece if at % 2 == 0 else texts[at // 2] or piece for at, piece in enumerate(pieces))


def _matches(root: Path, pattern: str, paths: Sequence[str], ranks: Mapping[str, int] | None) -> bool:
    try:
        start, names, numbers = matching_files(root / pattern)
    except CheckpointError:
        return False
    found = {(start / name).relative_to(root).as_posix(): rank for name, rank in (numbers or dict.fromkeys(names)).items()}
    return found == (dict.fromkeys(paths) if ranks is None else ranks)


def _writer(file: Path) -> int | None:
    """Return the rank that wrote a file, if its sharded tensors say so."""
    try:
        return read_torch(file, file.parent, [file.name], unknown="opaque").ranks.get(file.name)
    except (CheckpointError, OSError):
        return None
