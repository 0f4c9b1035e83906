"""The open pool of this process, for magics and for refusing a second pool."""

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
    """Record that a pool is being started while the block runs."""
    _starting[0] = num_ranks
    try:
        yield
    finally:
        _starting[0] = 0


def num_starting() -> int:
    """Return the number of ranks that are being started now, 0 if no pool is starting."""
    return _starting[0]


def set_open_pool(pool: WorkerPool) -> None:
    """Register a pool that has been started."""
    _latest[:] = [weakref.ref(pool)]


def open_pool() -> WorkerPool | None:
    """Return the open pool of this process, or None."""
    pool = _latest[0]() if _latest else None
    return None if pool is None or pool.closed else pool


def current_pool() -> WorkerPool:
    """Return the open pool of this process.

    Raises:
        PoolStateError: No pool is open.
    """
    pool = open_pool()
    if pool is None:
        raise PoolStateError("no pool is open. Start one with: pool = labkit.WorkerPool(world_size=4)")
    return pool


def refuse_second_pool(otherwise: str) -> None:
    """Raise an error if a pool is open.

    Args:
        otherwise: What to do instead of using that pool; the end of the message.

    Raises:
        PoolStateError: A pool is open.
    """
    pool = open_pool()
    if pool is not None:
        raise PoolStateError(f"a pool is open already: {pool!r}. Use it (labkit.current_pool()), {otherwise}.")


def _after_fork() -> None:
    """Forget the pool in a forked child of the kernel: the sockets and workers belong to the parent."""
    pool = open_pool()
    if pool is not None:
        pool.abandon()
    _latest.clear()


os.register_at_fork(after_in_child=_after_fork)
