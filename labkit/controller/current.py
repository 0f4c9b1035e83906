"""Knows which pool of this process is open; magics and second pools ask here."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.errors import PoolStateError

if TYPE_CHECKING:
    from labkit.controller.pool import WorkerPool

_latest: list[weakref.ref[WorkerPool]] = []
_starting = [0]


@contextlib.contextmanager
def starting(num_ranks: int) -> Iterator[None]:
    """While the block runs, a pool is being started."""
    _starting[0] = num_ranks
    try:
        yield
    finally:
        _starting[0] = 0


def num_starting() -> int:
    """How many ranks are being started now, 0 when none is."""
    return _starting[0]


def set_open_pool(pool: WorkerPool) -> None:
    """A pool has been started."""
    _latest[:] = [weakref.ref(pool)]


def open_pool() -> WorkerPool | None:
    """The open pool of this process, or None."""
    pool = _latest[0]() if _latest else None
    return None if pool is None or pool.closed else pool


def current_pool() -> WorkerPool:
    """The open pool of this process.

    Raises:
        PoolStateError: No pool is open.
    """
    pool = open_pool()
    if pool is None:
        raise PoolStateError("no pool is open. Start one with: pool = labkit.WorkerPool(world_size=4)")
    return pool


def refuse_second_pool(otherwise: str) -> None:
    """Refuse while a pool is open.

    Args:
        otherwise: What to do instead of using that pool.

    Raises:
        PoolStateError: A pool is open.
    """
    pool = open_pool()
    if pool is not None:
        raise PoolStateError(f"a pool is open already: {pool!r}. Use it (labkit.current_pool()), {otherwise}.")


def _after_fork() -> None:
    """A forked child of the kernel has no pool: the sockets and workers belong to its parent."""
    pool = open_pool()
    if pool is not None:
        pool.abandon()
    _latest.clear()


os.register_at_fork(after_in_child=_after_fork)
