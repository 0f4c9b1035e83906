"""Notes on files in a directory that are not read as part of a checkpoint, in case the user expects their contents."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from pathlib import Path

from labkit.checkpoint.wording import listed

#: Files that only describe a checkpoint or are derived from others, so nothing is lost without them; and files that other checks
#: cover.
DECORATION = (
    "*config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.md",
    "LICENSE*", "manifest.json", "*.distcp", ".*",
)  # fmt: skip
_MOST = 4


def unread_files(root: Path, taken: Collection[str]) -> list[str]:
    """Return a list with a note on a directory's regular files that are neither taken nor decoration; empty if there are none.

    Args:
        root: The directory.
        taken: Names of files that are read, or already reported.
    """
    found = sorted(
        child.name
        for child in root.iterdir()
        if child.name not in taken
        and not any(fnmatch.fnmatchcase(child.name, pattern) for pattern in DECORATION)
        and child.is_file()
    )
    return [f"left out, since labkit reads no checkpoint from it: {listed(found, most=_MOST)}"] if found else []
