"""Ranks inside a notebook: a lab kit for PyTorch's distributed state.

Importing this package starts nothing and imports no torch. ``%load_ext labkit`` adds ``%%spmd`` and ``%pool`` to a
notebook and begins to warm up the fork server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.base.lazy import lazy_names
from labkit.base.version import __version__

if TYPE_CHECKING:
    from labkit.base.ranks import RankResults
    from labkit.controller.current import current_pool
    from labkit.controller.pool import WorkerPool
    from labkit.errors import (
        LabkitError,
        OpenCollectiveError,
        PoolStateError,
        RankFailedError,
        RunInterrupted,
        RunTimeoutError,
        WorkerDiedError,
    )
    from labkit.notebook.expect import expect_error

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "controller.current": "current_pool",
        "controller.pool": "WorkerPool",
        "errors": ("LabkitError OpenCollectiveError PoolStateError RankFailedError RunInterrupted RunTimeoutError WorkerDiedError"),
        "notebook.expect": "expect_error",
        "base.ranks": "RankResults",
    },
)
__all__ += ["__version__", "load_ipython_extension"]


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and warm up the fork server in the background. ``%load_ext labkit`` calls this."""
    from labkit.notebook.magics import register

    register(shell)
