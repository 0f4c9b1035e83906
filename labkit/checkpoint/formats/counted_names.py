"""Detection of missing files, where no index lists the files, by the numbers in the others' names.

| the names | are complete if |
| --- | --- |
| say how many there are: ``-00001-of-00003``, as Hugging Face writes them | all numbers up to that one are there |
| belong to parts of one state, and differ in one number | it counts from 0 without a gap |
| the same, but they differ in several numbers | one of these counts from 0 without a gap, or all combinations are there |

Otherwise files are missing, which is an error. But reading a single file that seems to be one of several is only a warning, since
it may be whole. A file seems so in three cases: the file beside it with the nearest number holds other weights of a model; that
file holds the same names, and a word such as ``stage`` precedes the number (``stage_0``: copies, or parts with names of their own);
or there is no such file, and such a word precedes a number above 0 (``rank1``). Numbers from :data:`MOST_RANKS` up, such as dates,
are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path

from labkit.checkpoint.index.model import Gap
from labkit.checkpoint.wording import counted, listed, quoted

MOST_RANKS = 1 << 20

_NUMBER = re.compile(r"[0-9]+")
_STATED = re.compile(r"-([0-9]+)-of-([0-9]+)\b")
_ONE_OF_SEVERAL = re.compile(r"(?<![a-z])(?:rank|shard|stage|part)[-_=.]?([0-9]+)", re.IGNORECASE)
_MOST_NAMED = 4


def lacking(names: Sequence[str]) -> tuple[int, int, list[str]]:
    """Return the number of files that names such as ``-00001-of-00003`` state, how many are missing, and the first missing ones."""
    found = [(name, match) for name in names if (match := _STATED.search(name)) is not None]
    total = max((int(match[2]) for _, match in found), default=0)
    there = {int(match[1]) for _, match in found if 1 <= int(match[1]) <= total}
    missing: list[str] = []
    if len(there) < total:
        name, match = found[0]
        number = 0
        while len(missing) < min(_MOST_NAMED, total - len(there)):
            number += 1
            if number not in there:
                missing.append(f"{name[: match.start()]}-{number:0{len(match[1])}d}-of-{match[2]}{name[match.end() :]}")
    return total, total - len(there), missing


def gaps(names: Sequence[str], root: Path) -> list[Gap]:
    """Return the gaps in the names of files that hold parts of one state, by this module's table.

    Args:
        names: The names, relative to ``root``.
        root: Their directory.
    """
    result = []
    total, number, missing = lacking(names)
    if number:
        pattern = root / _STATED.sub(lambda match: f"-*-of-{match[2]}", names[0])
        there = all((root / name).exists() for name in missing)
        way = "Name the directory, or their index" if there else "Copy them from where they were saved, and name the directory"
        what = (
            f"of the {total:,} files that its name counts, {_are(number)} not read: {listed(missing, number, _MOST_NAMED)}. {way}"
        )
        result.append(Gap("error", f"{what}, or {quoted(pattern)}"))
    groups: dict[str, list[str]] = {}
    for name in names:
        if not _STATED.search(name):
            groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    return result + [gap for group in groups.values() if len(group) > 1 and (gap := _gap(group, root)) is not None]


def _gap(names: Sequence[str], root: Path) -> Gap | None:
    columns = [(place, column) for place, column in enumerate(_columns(names)) if len(set(column)) > 1]
    if not columns or any(max(column) >= MOST_RANKS for _, column in columns):
        return None
    if len(columns) > 1:
        return _gap_of_several(names, [column for _, column in columns])
    ((place, column),) = columns
    missing = sorted(set(range(max(column) + 1)) - set(column))
    if not missing:
        return None
    first = [_with_number(names[0], place, number) for number in missing[:_MOST_NAMED]]
    hint = (
        f"; if the names count from 1, write {quoted(root / _with_text(names[0], place, '{rank+1}'))}"
        if sorted(column) == list(range(1, len(column) + 1))
        else ""
    )
    return Gap(
        "error",
        f"its files hold parts of one state, and by the number in their names {_are(len(missing))} missing: "
        f"{listed(first, len(missing), _MOST_NAMED)}. Copy them from where they were saved{hint}",
    )


def _gap_of_several(names: Sequence[str], columns: Sequence[Sequence[int]]) -> Gap | None:
    if any(sorted(column) == list(range(len(names))) for column in columns):
        return None
    counts = all(set(column) == set(range(max(column) + 1)) for column in columns)
    if counts and prod(len(set(column)) for column in columns) == len(names):
        return None
    return Gap(
        "error",
        f"its {len(names)} files hold parts of one state, and none of the {len(columns)} numbers in which their names differ "
        f"({listed(names)}) counts through from 0, so files may be missing. Compare them with where they were saved",
    )


def gap_of_one(name: str, root: Path, other_weights: Callable[[Path], bool]) -> Gap | None:
    """Return a warning if a file that is read on its own seems to be one of several; else None.

    Args:
        name: Its name, relative to ``root``.
        root: The directory.
        other_weights: Returns whether another file holds a model's weights, and shares no names with this one.

    Ranks: local. May read the index of one other file.
    """
    file = root / name
    if _STATED.search(file.name):
        return None
    beside = _beside(file)
    if beside:
        place, nearest = min(
            ((place, other) for place, others in beside.items() for other in others.values()),
            key=lambda found: abs(_numbers(found[1].name)[found[0]] - _numbers(file.name)[found[0]]),
        )
        pattern = file.with_name(_with_text(file.name, place, "{rank}"))
        if not other_weights(nearest):
            if _ONE_OF_SEVERAL.search(file.name) is None:
                return None
            return Gap(
                "warning",
                f"it is read alone, and its name suggests that it is one of several, like {nearest.name} beside it. If they are "
                f"copies, one is enough. If each holds a part, this is only one; to read them together, name {quoted(pattern)}",
            )
        return Gap(
            "warning",
            f"it is read alone, and {nearest.name} beside it holds other weights, so it may be only a part of the model. "
            f"To read them together, name {quoted(pattern)}",
        )
    word = _ONE_OF_SEVERAL.search(file.name)
    number = int(word[1]) if word is not None else 0
    if word is None or not 0 < number < MOST_RANKS:
        return None
    place = len(_NUMBER.findall(file.name[: word.start(1)]))
    others = [_with_number(file.name, place, before) for before in range(min(number, _MOST_NAMED))]
    return Gap(
        "warning",
        f"it is read alone, and its name suggests that there are others before it: {listed(others, number, _MOST_NAMED)}. "
        f"If each holds a part, copy them from where they were saved, and name them together: "
        f"{quoted(file.with_name(_with_text(file.name, place, '{rank}')))}",
    )


def _beside(file: Path) -> dict[int, dict[int, Path]]:
    """Return the files beside this one whose names differ from its own in one number, keyed by that number's place and value."""
    mine, form = _numbers(file.name), _NUMBER.sub("*", file.name)
    found: dict[int, dict[int, Path]] = {}
    for other in sorted(file.parent.iterdir()) if mine else ():
        if other.name != file.name and _NUMBER.sub("*", other.name) == form and other.is_file():
            theirs = _numbers(other.name)
            differing = [place for place, (left, right) in enumerate(zip(mine, theirs, strict=True)) if left != right]
            if len(differing) == 1:
                found.setdefault(differing[0], {})[theirs[differing[0]]] = other
    return found


def rank_pattern(names: Sequence[str]) -> str | None:
    """Return one pattern for names, with ``{rank}`` or ``{rank+1}``, if a number in them may be the rank; else None.

    It may be if the names differ only in that number, it differs in all of them, and no more ranks are missing than present.
    """
    if len({_NUMBER.sub("*", name) for name in names}) != 1 or lacking(names)[0]:
        return None
    columns = [(place, column) for place, column in enumerate(_columns(names)) if len(set(column)) > 1]
    if len(columns) != 1:
        return None
    ((place, column),) = columns
    if len(set(column)) < len(names) or max(column) + 1 > 2 * len(names):
        return None
    from_one = sorted(column) == list(range(1, len(names) + 1))
    return _with_text(names[0], place, "{rank+1}" if from_one else "{rank}")


def _are(number: int) -> str:
    return f"{counted(number, 'file')} {'is' if number == 1 else 'are'}"


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _columns(names: Iterable[str]) -> list[list[int]]:
    """Return, for names that are otherwise equal, the numbers at each place as one list."""
    return [list(column) for column in zip(*map(_numbers, names), strict=True)]


def _with_number(name: str, place: int, number: int) -> str:
    digits = _NUMBER.findall(name)[place]
    width = len(digits)
    return _with_text(name, place, f"{number:0{width}d}" if digits.startswith("0") else str(number))


def _with_text(name: str, place: int, text: str) -> str:
    match = list(_NUMBER.finditer(name))[place]
    return name[: match.start()] + text + name[match.end() :]
