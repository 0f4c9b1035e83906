"""Name the files of a directory that no reader of checkpoints takes: somebody may miss what is in them."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from pathlib import Path

from labkit.checkpoint.wording import listed

#: What describes a checkpoint or is made from others, so that nothing is lost without it; and files that other checks look at.
DECORATION = (
    "*config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*.md",
    "LICENSE*", "manifest.json", "*.distcp", ".*",
)  # fmt: skip
_MOST = 4


def unread_files(root: Path, taken: Collection[str]) -> list[str]:
    """Return a note on the regular files of a directory that are neither taken nor decoration, or nothing where there are none.

    Args:
        root: The directory.
        taken: Names of files that are read, or told already.
    """
    found = sorted(
        child.name
        for child in root.iterdir()
        if child.name not in taken
        and not any(fnmatch.fnmatchcase(child.name, pattern) for pattern in DECORATION)
        and child.is_file()
    )
    return [f"left out, since labkit reads no checkpoint from it: {listed(found, most=_MOST)}"] if found else []
