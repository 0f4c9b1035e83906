"""Detection of files found where a checkpoint should be: a Git LFS pointer, or a web page that a server sent."""

from __future__ import annotations

import re
from pathlib import Path

from labkit.checkpoint.errors import CheckpointFormatError
from labkit.checkpoint.files.plain_files import open_regular

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"\s*(<\?xml|<!doctype|<html|<head)", re.IGNORECASE)


def refuse_mistaken(path: Path) -> None:
    """Raise :class:`CheckpointFormatError` for a Git LFS pointer or a web page. Ranks: local. Reads the first bytes."""
    with open_regular(path) as file:
        head = file.read(256) or b""
    if head.startswith(_POINTER):
        raise CheckpointFormatError(
            path,
            "it is a pointer of Git LFS, not the file itself. Run `git lfs pull` where it was cloned, or download the file.",
        )
    if _PAGE.match(head):
        raise CheckpointFormatError(
            path,
            "it is a web page, not the file itself: a server answered with a page. Read what it says, and download the file again.",
        )
