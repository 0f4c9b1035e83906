"""Files and JSON that somebody else made: only regular files are opened, names stay in their folder, JSON means one thing.

Nothing that is not a regular file is opened at all: a FIFO would hold the reader, a device may have no end. A link to a regular
file is followed, since the caches of Hugging Face are made of such links; a link to anything else is refused like its target.
"""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from labkit import places
from labkit.checkpoint.errors import CheckpointFormatError


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Raises:
        CheckpointFormatError: It is something else, which is left unopened.
        OSError: It is missing, or must not be read.
    """
    try:
        return places.open_regular(path)
    except places.NotRegularError as error:
        raise _special(path, error.kind) from None


def refuse_special(path: Path) -> None:
    """Raise :class:`CheckpointFormatError` for what is neither a regular file nor a directory nor a link to one of them."""
    mode = os.stat(path).st_mode
    if not stat.S_ISDIR(mode):
        _refuse_special(path, mode)


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes, -1 where nothing is there; errors as :func:`open_regular`."""
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
    """Return all bytes that a regular file says it has; errors as :func:`open_regular`."""
    with open_regular(path) as file:
        # Some of what the kernel shows as a regular file, such as /proc/kmsg, has no size, no end, and at times no data.
        return file.read(os.fstat(file.fileno()).st_size) or b""


def is_inside(name: object, *, nested: bool = False) -> bool:
    """Return whether a name from a list can only be a file in the list's own folder.

    Args:
        name: What the list says: any value.
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
    """Parse JSON as RFC 8259 has it: UTF-8, each name once in its object, no NaN or Infinity.

    Raises:
        ValueError: It is none; the text says why.
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
    raise ValueError(f"{text} is no JSON")
