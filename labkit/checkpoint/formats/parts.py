"""Detection of the checkpoints in a directory, from the kinds of its files.

| in the directory | one part |
| --- | --- |
| ``.metadata`` | with the files that it names: a DCP checkpoint, called ``.metadata`` |
| an index with a ``weight_map`` | with the files that it lists, called by the index |
| other safetensors or torch.save files | those whose names differ only in numbers, called by a pattern; for names \
such as ``-00001-of-00003``, which Hugging Face's writers use, all have to be there |
| a sub-directory with one of these | called by its name |

A directory with one part is that checkpoint. If it has several parts, the user has to say which one is meant: nothing is included
because it is in the same directory, and nothing is left out because another part has a better name. How the files of one part
belong together is decided in :mod:`labkit.checkpoint.formats.rank_files`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labkit.checkpoint.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
)
from labkit.checkpoint.files.plain_files import is_inside, open_regular, parse_json, read_regular, refuse_special, regular_size
from labkit.checkpoint.formats.archive import TorchArchive
from labkit.checkpoint.formats.counted_names import lacking, rank_pattern
from labkit.checkpoint.wording import counted, listed, quoted

METADATA_FILE = ".metadata"
INDEX_SUFFIX = ".index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
Format = Literal["dcp", "torch", "safetensors", "directory"]

_WHAT = {"dcp": "DCP", "torch": "torch.save", "safetensors": "safetensors", "directory": "a directory with a checkpoint"}
_PLACEHOLDER = re.compile(r"\{rank(\+1)?\}|\*")


@dataclass(frozen=True)
class Part:
    """One of the checkpoints in a directory.

    Attributes:
        name: The name to use for it: a file, a sub-directory, or a pattern.
        format: The format.
        files: Its files, relative to the directory; empty for DCP, whose index names them.
    """

    name: str
    format: Format
    files: tuple[str, ...] = ()

    @property
    def offered(self) -> str:
        """Return a name that is accepted: that of the first of several files whose numbers do not say how they belong together."""
        return self.files[0] if "*" in self.name and not lacking(self.files)[0] else self.name

    @property
    def text(self) -> str:
        """The part in words."""
        number = f", {counted(len(self.files), 'file')}" if len(self.files) > 1 else ""
        if self.offered != self.name:
            number = f", one of {len(self.files)} files such as {self.name}"
        elif is_pattern(Path(self.name)) and "*" not in self.name:
            number += f" if they are those of ranks, else one such as {self.files[0]}"
        return f"{self.offered}  ({_WHAT[self.format]}{number})"


def parts_of(root: Path) -> list[Part]:
    """Return the checkpoints in a directory, by the table of this module.

    Raises:
        CheckpointFormatError: An index cannot be read.

    Ranks: local. Reads the first bytes of each file.
    """
    own = _own_parts(root)
    folders = sorted(child for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))
    return own + [Part(child.name, "directory") for child in folders if _holds_one(child)]


def _holds_one(folder: Path) -> bool:
    try:
        return bool(_own_parts(folder))
    except CheckpointFormatError:
        return True


def _own_parts(root: Path) -> list[Part]:
    files = sorted(child for child in root.iterdir() if child.name == METADATA_FILE or _is_plain(child))
    parts: list[Part] = []
    claimed: set[str] = set()
    names = {file.name for file in files}
    if METADATA_FILE in names:
        refuse_special(root / METADATA_FILE)
        parts.append(Part(METADATA_FILE, "dcp"))
        claimed.add(METADATA_FILE)
    for index in (file for file in files if file.name.endswith(INDEX_SUFFIX)):
        listed = listed_in(index)
        if listed is not None:
            kind: Format = "safetensors" if all(name.endswith(".safetensors") for name in listed) else "torch"
            parts.append(Part(index.name, kind, tuple(listed)))
            claimed.update(listed)
    groups: dict[tuple[Format, str], list[str]] = {}
    for file in files:
        kind_of = None if file.name in claimed or file.suffix == ".distcp" else format_of(file)
        if kind_of is not None:
            groups.setdefault((kind_of, re.sub("[0-9]+", "*", file.name)), []).append(file.name)
    for (kind, _), found in groups.items():
        parts.append(Part(rank_pattern(found) or _pattern_of(found), kind, tuple(by_number(found))))
    return parts


def _pattern_of(names: Sequence[str]) -> str:
    """Return one pattern for names that differ only in numbers, with ``*`` for the numbers that differ."""
    pieces = zip(*(re.split("([0-9]+)", name) for name in names), strict=True)
    return "".join(same[0] if len(set(same)) == 1 else "*" for same in pieces)


def _is_plain(child: Path) -> bool:
    """Return whether a directory entry may be a file of a checkpoint. A FIFO or device with such a name is refused."""
    if child.name.endswith(INDEX_SUFFIX):
        regular_size(child)
    if child.is_dir() or child.name[0] == ".":
        return False
    if child.suffix in (*TORCH_SUFFIXES, ".safetensors"):
        refuse_special(child)
    return child.is_file()


def listed_in(index: Path) -> list[str] | None:
    """Return the names of the files that an index lists; None if it is another JSON file.

    Raises:
        CheckpointFormatError: Its ``weight_map`` cannot be read or points out of its directory.
    """
    try:
        content = parse_json(read_regular(index))
        names = sorted(set(content["weight_map"].values())) if isinstance(content, dict) and "weight_map" in content else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CheckpointFormatError(index, "it has no readable weight_map") from None
    for name in names or ():
        if not is_inside(name):
            raise CheckpointFormatError(index, f"it points at {name!r}, outside its own directory")
    return names


def format_of(file: Path) -> Format | None:
    """Return a file's format by its first bytes, or by its suffix if these are damaged; None for other files."""
    with open_regular(file) as data:
        magic = data.read(16) or b""
    if magic[:2] == b"PK":
        return "torch" if _is_torch_archive(file) or file.suffix in TORCH_SUFFIXES else None
    if magic[8:9] == b"{" and int.from_bytes(magic[:8], "little") <= file.stat().st_size:
        return "safetensors"
    if file.suffix == ".safetensors":
        return "safetensors"
    return "torch" if file.suffix in TORCH_SUFFIXES else None


def _is_torch_archive(file: Path) -> bool:
    try:
        with open_regular(file) as data:
            TorchArchive(data, file, 0, file.stat().st_size)
    except CheckpointError:
        return False
    return True


def by_number(names: Sequence[str]) -> list[str]:
    """Return names sorted so that the numbers in them are compared as numbers."""
    return sorted(names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", name)])


def only_part(root: Path) -> Part:
    """Return the only checkpoint in a directory.

    Raises:
        AmbiguousCheckpointError: There are several, or they are only in sub-directories.
        CheckpointNotFoundError: There is none.
        IncompleteCheckpointError: Its files are numbered ``-00001-of-00003``, and one is missing.
    """
    parts = parts_of(root)
    if not parts:
        raise CheckpointNotFoundError(root, "the directory holds no checkpoint that labkit knows (DCP, torch.save, safetensors)")
    if len(parts) == 1 and parts[0].format != "directory":
        check_numbered(root, parts[0].files)
        return parts[0]
    if len(parts) == 1:
        raise AmbiguousCheckpointError(
            root,
            f"it holds no checkpoint itself, and its folder {parts[0].name} does",
            [str(root / parts[0].name)],
            advice=f"Name that folder: {quoted(root / parts[0].name)}.",
        )
    here = any(part.format != "directory" for part in parts)
    example = next((part for part in parts if not is_pattern(Path(part.offered))), parts[0])
    number = counted(len(parts), "checkpoint")
    folders = [part.name for part in parts if part.format == "directory"]
    alike = len(folders) > 1 and len({re.sub("[0-9]+", "", name) for name in folders}) == 1
    pattern = root / _pattern_of(folders).replace("*", "{rank}", 1) / "FILE" if alike else None
    raise AmbiguousCheckpointError(
        root,
        f"it holds {number}, and labkit does not guess which you mean"
        if here
        else f"it holds none itself, and {number} in folders",
        [part.text for part in parts[:20]],
        advice=f"Name one of them, such as {quoted(root / example.offered)}. If they are parts of one checkpoint, migrate puts "
        "them together: --part NAME=PART reads a part under that name, and may be repeated."
        + (f" If each folder is that of a rank, write {quoted(pattern)}." if pattern is not None else ""),
    )


def check_numbered(root: Path, names: Sequence[str]) -> None:
    """Raise :class:`IncompleteCheckpointError` if files numbered in Hugging Face's form are incomplete."""
    total, number, missing = lacking(names)
    if number:
        are = "is" if number == 1 else "are"
        raise IncompleteCheckpointError(
            root,
            f"its files are numbered to {total:,}, and {counted(number, 'file')} of them {are} missing: {listed(missing, number)}",
        )


# -- paths with a pattern ---------------------------------------------------------------------------------------------


def is_pattern(path: Path) -> bool:
    """Return whether a path contains ``{rank}``, ``{rank+1}`` or ``*``."""
    return _PLACEHOLDER.search(str(path)) is not None


def matching_files(pattern: Path) -> tuple[Path, list[str], Mapping[str, int] | None]:
    """Find the files of a path with ``{rank}`` for the rank and ``*`` for any text, in one or several components.

    ``{rank+1}`` is for names that count from 1.

    Returns:
        The directory before the first placeholder, the files relative to it, and file to rank if the pattern contains the rank.

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
