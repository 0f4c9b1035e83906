"""Detection of changes to the files of a source while they are read.

Each file's device, inode, size, mtime and ctime are noted before the index is read. They are compared whenever a descriptor is
opened to read data, and once more for every file after the last read. Any difference is refused, even if only the times differ:
safetensors have no checksum, so nothing else would reveal a half-overwritten file.

Changes that this does not detect:

- A write that keeps the size, within one clock step of the file system after the file was noted. On Linux 6.18 (ext4 and tmpfs),
all of 2,000 writes made right after the times were read were detected. Before Linux 6.13, a step is a tick of the kernel's timer.
- Stores through a shared memory map, which the kernel records only when it writes the page back.
- Changes on network file systems that report cached times.
- Changes behind links to directories inside a source: their targets are noted only after the index is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from labkit.checkpoint.errors import CheckpointError, CheckpointFormatError
from labkit.checkpoint.files.plain_files import FileState
from labkit.checkpoint.formats.patterns import is_pattern, matching_files


def states_of(source: Path) -> dict[Path, FileState]:
    """Return the state of every file in a directory and below, of a pattern's files, or of a file and its neighbours."""
    found = {}
    for path in _candidates(source):
        with suppress(OSError):
            found[path] = FileState.of(path.stat())
    return found


def _candidates(source: Path) -> Iterator[Path]:
    if source.is_dir():
        for folder, _, names in os.walk(source):
            yield from (Path(folder, name) for name in names)
    elif source.exists():
        yield from source.parent.iterdir()
    elif is_pattern(source):
        with suppress(CheckpointError):  # opening the checkpoint raises it again
            root, names, _ = matching_files(source)
            yield from (root / name for name in names)


def changed(path: Path) -> CheckpointFormatError:
    """Return the error for a file that changed while it was read."""
    return CheckpointFormatError(
        path,
        "it was changed while it was read (its size, times or inode differ). Run the command again when nothing writes there any "
        "more.",
    )
