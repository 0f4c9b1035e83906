"""Knows which pool of this process is open; magics and second pools ask here."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from labkit.errors import PoolStateError

if TYPE_CHECKING:
    from labkit.controller.pool import WorkerPool

_latest: list[weakref.ref[WorkerPool]] = []


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
