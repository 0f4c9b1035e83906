"""The CRC-32 of zip archives, computed by ISA-L, which is six times as fast as Python's zlib."""

from __future__ import annotations

import os

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["crc32", "crc32_combine", "file_crc", "read_into"]

# Small enough to stay in the CPU cache between reading and summing.
_STEP_BYTES = 1 << 18
_READ_BYTES = 1 << 28  # the kernel moves at most 2 GiB per call


def read_into(fd: int, buffer: memoryview, start: int) -> int:
    """Fill a buffer from a file position, and return the number of bytes read; it is smaller only at the file's end."""
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done : done + _READ_BYTES]], start + done)
        if got == 0:
            break
        done += got
    return done


def file_crc(fd: int, start: int, length: int) -> int:
    """Return the CRC-32 of a byte range of a file."""
    crc = 0
    buffer = memoryview(bytearray(min(_STEP_BYTES, length) or 1))
    for at in range(0, length, _STEP_BYTES):
        part = buffer[: min(_STEP_BYTES, length - at)]
        read_into(fd, part, start + at)
        crc = crc32(part, crc)
    return crc
