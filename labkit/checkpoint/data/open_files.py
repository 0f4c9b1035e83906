"""A reader's open files of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from labkit.checkpoint.errors import IncompleteCheckpointError
from labkit.checkpoint.files.plain_files import FileState, open_regular
from labkit.checkpoint.formats.source_files import changed
from labkit.checkpoint.index.model import Checkpoint

# A checkpoint may have more files than a process may open (often 1,024), and each of several threads has its own reader.
_MOST_OPEN = 32


class OpenFiles:
    """Files of a checkpoint, each opened on first use.

    Args:
        checkpoint: An opened checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[str, Any] = {}

    def get(self, file: str) -> Any:
        """Return an open binary file of the checkpoint. Use it at once: getting other files may close it, as :meth:`close` does.

        Raises:
            IncompleteCheckpointError: It is missing.
            CheckpointFormatError: It is no regular file.
            CheckpointFormatError: It no longer matches the checkpoint's ``states``.
        """
        found = self._files.get(file)
        if found is None:
            path: Path = self._checkpoint.root / file
            while len(self._files) >= _MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            try:
                found = self._files[file] = open_regular(path)
            except FileNotFoundError:
                raise IncompleteCheckpointError(path, "the checkpoint's index names this file, and it is missing") from None
            if file in self._checkpoint.states and FileState.of(os.fstat(found.fileno())) != self._checkpoint.states[file]:
                raise changed(path)
        return found

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._files.popitem()[1].close()
