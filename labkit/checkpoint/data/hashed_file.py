"""A new file that is hashed while it is written, and synced to disk when it is closed."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import xxhash

from labkit.checkpoint.files import direct_io
from labkit.checkpoint.files.checksums import crc32, read_into
from labkit.checkpoint.index.manifest import FileSum

_STEP_BYTES = 1 << 18  # small enough to stay in the CPU cache between copying and hashing


class HashedFile(io.RawIOBase):
    """A new file that hashes what is written to it. It never replaces an existing file, and syncs to disk on close.

    Whole blocks bypass the page cache if the file system supports it; the last part goes through the cache.
    """

    def __init__(self, path: Path) -> None:
        self._file: Any = path.open("xb", buffering=0)
        self._direct = direct_io.set_direct(self._file.fileno(), on=True)
        self._block, self._filled = direct_io.aligned_block(), 0
        self._digest, self._size = xxhash.xxh3_128(), 0
        self._error: OSError | None = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # torch's zip writer hides a failed write behind an error of its own ("unexpected pos 704 vs 598").
        try:
            super().__exit__(kind, error, trace)
        except OSError as late:
            self._error = self._error or late
        if self._error is not None:
            raise self._error

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            count = min(_STEP_BYTES, len(self._block) - self._filled, len(view) - at)
            self._block[self._filled : self._filled + count] = view[at : at + count]
            self._take(count)
            at += count
        return len(view)

    def copy(self, fd: int, start: int, length: int) -> tuple[int, int]:
        """Append a byte range of another file.

        Returns:
            The number of bytes copied (less than ``length`` only if that file ends earlier), and their CRC-32.
        """
        done = crc = 0
        while done < length:
            room = min(_STEP_BYTES, len(self._block) - self._filled, length - done)
            part = self._block[self._filled : self._filled + room]
            count = read_into(fd, part, start + done)
            crc = crc32(part[:count], crc)
            self._take(count)
            done += count
            if count < room:
                break
        return done, crc

    def _take(self, count: int) -> None:
        """Hash and count bytes that were just appended to the block."""
        self._digest.update(self._block[self._filled : self._filled + count])
        self._filled += count
        self._size += count
        if self._filled == len(self._block):
            self._write_out()

    def _write_out(self) -> None:
        view = self._block[: self._filled]
        self._filled = 0
        try:
            while view:
                try:
                    count = self._file.write(view)
                except OSError as error:
                    if not (self._direct and direct_io.is_misaligned(error)):
                        raise
                    self._direct = direct_io.set_direct(self._file.fileno(), on=False)
                    continue
                view = view[count:]
        except OSError as error:
            self._error = self._error or error
            raise

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: the file is flushed and synced once, on close."""

    def close(self) -> None:
        if not self.closed:
            try:
                if self._direct and self._filled:
                    self._direct = direct_io.set_direct(self._file.fileno(), on=False)
                self._write_out()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()
                super().close()

    def total(self) -> FileSum:
        """Return the size and hash of everything written so far."""
        return FileSum(self._size, self._digest.hexdigest())
