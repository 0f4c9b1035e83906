"""Reading and writing past the page cache (``O_DIRECT``), where the file system offers it.

A checkpoint is written once and read back once. The page cache would hold pages that nobody asks for again, and filling it takes
more processor time than everything else that a migration does. A read past the cache is also the only one that asks the disk
whether it has what was written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

BLOCK_BYTES = 1 << 22
_FLAG = getattr(os, "O_DIRECT", 0)  # Linux


def aligned_block() -> memoryview:
    """A buffer of :data:`BLOCK_BYTES` at a page's beginning, as direct transfers need it."""
    return memoryview(mmap.mmap(-1, BLOCK_BYTES))


def set_direct(fd: int, on: bool) -> bool:
    """Switch a descriptor past the page cache, or back to it.

    Returns:
        Whether it goes past the cache now; False on file systems without it.
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
    """Whether a direct transfer failed because of its place or length, which the page cache would take."""
    return error.errno == errno.EINVAL
