"""Ranks inside a notebook: a lab kit for PyTorch's distributed state.

Importing this package starts nothing and imports no torch. ``%load_ext labkit`` adds ``%%spmd`` and ``%pool`` to a
notebook and begins to warm up the fork server.
"""

from __future__ import annotations

from typing import Any

from labkit.controller.current import current_pool
from labkit.controller.pool import WorkerPool
from labkit.errors import (
    LabkitError,
    PoolStateError,
    RankFailedError,
    RunInterrupted,
    RunTimeoutError,
    WorkerDiedError,
)
from labkit.notebook.expect import expect_error
from labkit.ranks import RankResults

__version__ = "0.1.0"

__all__ = [
    "LabkitError",
    "PoolStateError",
    "RankFailedError",
    "RankResults",
    "RunInterrupted",
    "RunTimeoutError",
    "WorkerDiedError",
    "WorkerPool",
    "current_pool",
    "expect_error",
    "load_ipython_extension",
]


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext labkit``: register the magics and warm up the fork server in the background."""
    from labkit.notebook.magics import register

    register(shell)
