"""Paths with a pattern: ``{rank}`` or ``{rank+1}`` for the rank, ``*`` for any text, in one or several components."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.checkpoint.errors import CheckpointFormatError, CheckpointNotFoundError

_PLACEHOLDER = re.compile(r"\{rank(\+1)?\}|\*")


def by_number(names: Sequence[str]) -> list[str]:
    """Return names sorted with the numbers in them compared as numbers."""
    return sorted(names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", name)])


def is_pattern(path: Path) -> bool:
    """Return whether a path contains ``{rank}``, ``{rank+1}`` or ``*``."""
    return _PLACEHOLDER.search(str(path)) is not None


def matching_files(pattern: Path) -> tuple[Path, list[str], Mapping[str, int] | None]:
    """Find the files of a path with ``{rank}`` for the rank and ``*`` for any text, in one or several components.

    ``{rank+1}`` is for names that count from 1.

    Returns:
        The directory before the first placeholder, the files relative to it, and each file's rank if the pattern contains the rank.

    Raises:
        CheckpointNotFoundError: No file matches.
        CheckpointFormatError: Two files have the same rank, or it is below 0.
    """
    components = pattern.parts
    first = next(index for index, part in enumerate(components) if _PLACEHOLDER.search(part))
    root = Path(*components[:first])
    found: list[tuple[Path, set[int]]] = [(root, set())]
    for component in components[first:]:
        found = [step for folder, ranks in found if folder.is_dir() for step in _children(folder, component, ranks)]
    files = {str(path.relative_to(root)): ranks for path, ranks in found if path.is_file() and len(ranks) < 2}
    if not files:
        raise CheckpointNotFoundError(pattern, "no file matches this pattern")
    if "{rank" not in str(pattern):
        return root, by_number(list(files)), None
    numbers = {name: next(iter(files[name])) for name in by_number(list(files))}
    for rank in numbers.values():
        same = [other for other, number in numbers.items() if number == rank]
        if len(same) > 1 or rank < 0:
            raise CheckpointFormatError(pattern, f"{' and '.join(same)} have rank {rank}. Write a pattern that tells them apart.")
    return root, list(numbers), numbers


def _children(folder: Path, component: str, ranks: set[int]) -> list[tuple[Path, set[int]]]:
    expression, end = "", 0
    offsets: list[int] = []
    for place in _PLACEHOLDER.finditer(component):
        expression += re.escape(component[end : place.start()]) + (".*" if place[0] == "*" else "([0-9]+)")
        if place[0] != "*":
            offsets.append(1 if place[1] else 0)
        end = place.end()
    expression += re.escape(component[end:])
    result = []
    for child in folder.iterdir():
        match = re.fullmatch(expression, child.name)
        if match is not None and (child.name[0] != "." or component[0] == "."):
            mine = {int(number) - offset for number, offset in zip(match.groups(), offsets, strict=True)}
            result.append((child, ranks | mine))
    return result
