"""Reading and writing past the page cache (``O_DIRECT``), if the file system supports it.

A checkpoint is written once and read back once. The page cache would keep pages that are never needed again, and filling it takes
more processor time than the rest of a migration. Besides, only a read that bypasses the cache proves that the data have reached the
disk.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

BLOCK_BYTES = 1 << 22
_FLAG = getattr(os, "O_DIRECT", 0)  # Linux


def aligned_block() -> memoryview:
    """Return a page-aligned buffer of :data:`BLOCK_BYTES`, as direct transfers need it."""
    return memoryview(mmap.mmap(-1, BLOCK_BYTES))


def set_direct(fd: int, on: bool) -> bool:
    """Make a descriptor bypass the page cache, or go through it again.

    Returns:
        Whether it bypasses the cache now; always False on file systems that do not support it.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _FLAG if on else flags & ~_FLAG)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return on and bool(_FLAG)


def is_misaligned(error: OSError) -> bool:
    """Return whether a direct transfer failed only for its offset or length, which the page cache would accept."""
    return error.errno == errno.EINVAL
