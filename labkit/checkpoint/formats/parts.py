"""Detection of the checkpoints in a directory, from the kinds of its files.

| in the directory | one part |
| --- | --- |
| ``.metadata`` | it and the files that it names: a DCP checkpoint, called ``.metadata`` |
| an index with a ``weight_map`` | it and the files that it lists, called by the index's name |
| other safetensors or torch.save files | those whose names differ only in numbers, called by a pattern; for names \
such as ``-00001-of-00003``, which Hugging Face's writers use, all have to be there |
| a sub-directory with one of these | called by its name |

A directory with one part is that checkpoint. If it has several parts, the user must say which one is meant: a part is neither
included merely for being in the same directory, nor left out merely because another has a better name.
:mod:`labkit.checkpoint.formats.rank_files` decides how the files of one part belong together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
from labkit.checkpoint.files.mistaken_files import refuse_mistaken
from labkit.checkpoint.files.plain_files import is_inside, open_regular, parse_json, read_regular, refuse_special, regular_size
from labkit.checkpoint.formats.archive import TorchArchive
from labkit.checkpoint.formats.counted_names import lacking, rank_pattern
from labkit.checkpoint.formats.patterns import by_number, is_pattern
from labkit.checkpoint.formats.rank_folders import rank_folders
from labkit.checkpoint.wording import counted, listed, quoted

METADATA_FILE = ".metadata"
INDEX_SUFFIX = ".index.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
Format = Literal["dcp", "torch", "safetensors", "directory"]

_WHAT = {"dcp": "DCP", "torch": "torch.save", "safetensors": "safetensors", "directory": "a directory with a checkpoint"}


@dataclass(frozen=True)
class Part:
    """One of the checkpoints in a directory.

    Attributes:
        name: The name that the user can give for it: a file, a sub-directory, or a pattern.
        format: The format.
        files: Its files, relative to the directory; empty for DCP, whose index names them.
    """

    name: str
    format: Format
    files: tuple[str, ...] = ()

    @property
    def offered(self) -> str:
        """Return the name to offer: just the first file's, if the numbers in names do not show how the files belong together."""
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
    """Return the checkpoints in a directory, by this module's table.

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
    """Return whether a directory entry may be a checkpoint's file. A FIFO or device with such a name is refused."""
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
        refuse_mistaken(index)
        raise CheckpointFormatError(index, "it has no readable weight_map") from None
    for name in names or ():
        if not is_inside(name):
            raise CheckpointFormatError(index, f"it points at {name!r}, outside its own directory")
    return names


def format_of(file: Path) -> Format | None:
    """Return a file's format, from its first bytes or, if those are damaged, its suffix; None for other files."""
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


def only_part(root: Path) -> Part:
    """Return the only checkpoint in a directory.

    Raises:
        AmbiguousCheckpointError: There are several, or they are only in sub-directories.
        CheckpointNotFoundError: There is none.
        IncompleteCheckpointError: Its files are numbered ``-00001-of-00003``, and one is missing.
    """
    parts = parts_of(root)
    if not parts:
        empty = not any(root.iterdir())
        raise CheckpointNotFoundError(
            root,
            "the directory holds no checkpoint, since it is empty. Name the one that holds the checkpoint, or copy its files into "
            "this one."
            if empty
            else "the directory holds no checkpoint that labkit knows (DCP, torch.save, safetensors). Name the file or the "
            "directory that holds it.",
        )
    if len(parts) == 1 and parts[0].format != "directory":
        check_numbered(root, parts[0].files)
        return parts[0]
    if len(parts) == 1:
        raise AmbiguousCheckpointError(
            root,
            f"it holds no checkpoint itself, but its folder {parts[0].name} does",
            [str(root / parts[0].name)],
            advice=f"Name that folder: {quoted(root / parts[0].name)}.",
        )
    here = any(part.format != "directory" for part in parts)
    example = next((part for part in parts if not is_pattern(Path(part.offered))), parts[0])
    number = counted(len(parts), "checkpoint")
    folders = [part.name for part in parts if part.format == "directory"]
    files = {name: [part.files for part in _own_parts(root / name) if part.files] for name in folders} if not here else {}
    raise AmbiguousCheckpointError(
        root,
        f"it holds {number}, and labkit does not guess which you mean"
        if here
        else f"it holds none itself, but {number} in folders",
        [part.text for part in parts[:20]],
        advice=f"Name one of them, such as {quoted(root / example.offered)}. If they are parts of one checkpoint, migrate puts "
        "them together: --part NAME=PART reads a part under that name, and may be repeated." + rank_folders(root, files),
    )


def check_numbered(root: Path, names: Sequence[str]) -> None:
    """Raise :class:`IncompleteCheckpointError` if files numbered in Hugging Face's form are incomplete."""
    total, number, missing = lacking(names)
    if number:
        are = "is" if number == 1 else "are"
        raise IncompleteCheckpointError(
            root,
            f"its files are numbered up to {total:,}, but {counted(number, 'file')} {are} missing: {listed(missing, number)}",
        )
