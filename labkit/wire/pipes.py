"""The pipes behind a worker's stdout and stderr. Whoever starts a worker keeps the read ends open too."""

from __future__ import annotations

import os

_PIECE_BYTES = 64 * 1024


def make_pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Two pipes: (read ends, write ends) for stdout and stderr."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    return (out_read, err_read), (out_write, err_write)


def redirect(write_fds: tuple[int, int]) -> None:
    """Point this process's fd 1 and fd 2 at the pipes' write ends."""
    for target, fd in zip((1, 2), write_fds, strict=True):
        os.dup2(fd, target)
        if fd != target:
            os.close(fd)


def drain(fd: int, limit: int = 1 << 20) -> str:
    """What is left in a pipe whose writer is gone, at most ``limit`` bytes."""
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
    return b"".join(parts).decode("utf-8", "replace")
