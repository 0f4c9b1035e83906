"""The pipes behind a worker's stdout and stderr: the parts that both the worker and its launcher need.

A worker's launcher also keeps the read ends open, and shares memory in which the worker keeps a copy of the bytes it read last.
So the launcher can report the last output of a worker that died: unread bytes are still in the pipe, and bytes that the worker had
read but not sent are in the copy.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

# More than a worker's queue of unsent output holds (see wire/transport.py), so nothing is lost when the process dies.
KEPT_BYTES = 512 * 1024
_PIECE_BYTES = 64 * 1024
_TOTAL = struct.Struct("=Q")
_STREAM_BYTES = _TOTAL.size + KEPT_BYTES


class Kept:
    """The last KEPT_BYTES that a worker has read from each of its two pipes, in memory that outlives it.

    Args:
        fd: A file of SIZE_BYTES that both processes have open; -1 for anonymous memory that a forked child shares.
    """

    SIZE_BYTES = 2 * _STREAM_BYTES

    def __init__(self, fd: int = -1) -> None:
        self._memory = mmap.mmap(fd, self.SIZE_BYTES)

    def keep(self, stream: int, data: bytes) -> None:
        """Record data that has been read from stream 0 (stdout) or 1 (stderr). Called by the worker."""
        base = stream * _STREAM_BYTES
        (total,) = _TOTAL.unpack_from(self._memory, base)
        tail = data[-KEPT_BYTES:]
        begin = (total + len(data) - len(tail)) % KEPT_BYTES
        first = tail[: KEPT_BYTES - begin]
        ring = base + _TOTAL.size
        self._memory[ring + begin : ring + begin + len(first)] = first
        self._memory[ring : ring + len(tail) - len(first)] = tail[len(first) :]
        _TOTAL.pack_into(self._memory, base, total + len(data))

    def last(self, stream: int) -> tuple[int, bytes]:
        """Return (the number of bytes read from the stream in all, the last of them)."""
        base = stream * _STREAM_BYTES
        (total,) = _TOTAL.unpack_from(self._memory, base)
        ring = self._memory[base + _TOTAL.size : base + _STREAM_BYTES]
        begin = total % KEPT_BYTES
        return total, ring[:total] if total <= KEPT_BYTES else ring[begin:] + ring[:begin]

    def close(self) -> None:
        """Free the memory in this process."""
        self._memory.close()


@dataclass(frozen=True, slots=True)
class Rest:
    """The end of what a dead worker wrote to one stream.

    Attributes:
        position: The position of its first byte, in bytes from the stream's beginning.
        data: The bytes.
    """

    position: int = 0
    data: bytes = b""

    def after(self, position: int) -> tuple[int, str]:
        """Return the output after a position: (the number of bytes in between that are lost, the text)."""
        lost = max(0, self.position - position)
        return lost, self.data[max(0, position - self.position) :].decode("utf-8", "replace")


def make_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Make two pipes: (read ends, write ends) for stdout and stderr."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    return (out_read, err_read), (out_write, err_write)


def redirect(write_fds: tuple[int, int]) -> None:
    """Point this process's fd 1 and fd 2 at the pipes' write ends."""
    for target, fd in zip((1, 2), write_fds, strict=True):
        os.dup2(fd, target)
        if fd != target:
            os.close(fd)


def take_rest(read_fds: tuple[int, int], kept: Kept) -> tuple[Rest, Rest]:
    """Return the end of what a dead worker wrote to stdout and stderr. Close the pipes and the copy."""
    rests = []
    for stream, fd in enumerate(read_fds):
        total, last = kept.last(stream)
        rests.append(Rest(total - len(last), last + drain(fd)))
        os.close(fd)
    kept.close()
    return rests[0], rests[1]


def drain(fd: int, limit: int = 1 << 20) -> bytes:
    """Read what is left in a pipe whose writer has ended, at most about ``limit`` bytes."""
    os.set_blocking(fd, False)
    parts: list[bytes] = []
    while sum(map(len, parts)) < limit:
        try:
            data = os.read(fd, _PIECE_BYTES)
        except BlockingIOError:
            break
        if not data:
            break
        parts.append(data)
    return b"".join(parts)
