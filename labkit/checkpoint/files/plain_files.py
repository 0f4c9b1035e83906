"""Safe access to untrusted files and JSON: open only regular files, confine names to their folder, refuse ambiguous JSON.

No other kind of file is opened: a FIFO would block the reader, and a device may have no end. Links to regular files are followed,
because Hugging Face's caches consist of them; a link to anything else is refused like its target.
"""

from __future__ import annotations

import io
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from labkit.base import places
from labkit.checkpoint.errors import CheckpointFormatError


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises:
        CheckpointFormatError: It is something else, and was not opened.
        OSError: It is missing, or may not be read.
    """
    try:
        return places.open_regular(path)
    except places.NotRegularError as error:
        raise _special(path, error.kind) from None


def refuse_special(path: Path) -> None:
    """Raise :class:`CheckpointFormatError` unless a path is a regular file, a directory, or a link to one of them."""
    mode = os.stat(path).st_mode
    if not stat.S_ISDIR(mode):
        _refuse_special(path, mode)


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes, or -1 if it does not exist; errors as :func:`open_regular`."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return -1
    _refuse_special(path, status.st_mode)
    return status.st_size


def _refuse_special(path: Path, mode: int) -> None:
    if kind := places.kind_of(mode):
        raise _special(path, kind)


def _special(path: Path, kind: str) -> CheckpointFormatError:
    return CheckpointFormatError(path, f"it is {kind}{' behind a link' if path.is_symlink() else ''}, and was not opened")


def read_regular(path: Path) -> bytes:
    """Return a regular file's bytes, up to the size that it reports; errors as :func:`open_regular`."""
    with open_regular(path) as file:
        # Kernel files such as /proc/kmsg look regular, but have no size, no end, and sometimes no data.
        return file.read(os.fstat(file.fileno()).st_size) or b""


def is_inside(name: object, *, nested: bool = False) -> bool:
    """Return whether a name from a list cannot lead out of the list's own folder.

    Args:
        name: The name in the list, of any type.
        nested: Whether it may also be in a folder below.
    """
    if not isinstance(name, str) or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and (nested or path.name == name)


def parse_json(text: bytes) -> Any:
    """Parse JSON as defined in RFC 8259: UTF-8, each name once in its object, no NaN or Infinity.

    Raises:
        ValueError: The text is not such JSON; the message says why.
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has the name {name!r} twice")
        found[name] = value
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


@dataclass(frozen=True, slots=True)
class FileState:
    """The file attributes used to detect a change."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Return the state in a result of ``stat``."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
