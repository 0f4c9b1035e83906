"""Checkpoint tools: inspect, verify, migrate, reshard, and save without risking the last good checkpoint.

They need neither a notebook nor a pool; ``labkit checkpoint`` offers them on the command line. Each name below loads its module on
first use, so that inspecting a checkpoint does not import the code that writes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.checkpoint.checks.findings import Finding, Report
    from labkit.checkpoint.checks.verification import verify
    from labkit.checkpoint.convert.engine import Result
    from labkit.checkpoint.convert.migration import migrate
    from labkit.checkpoint.convert.rename import read_rules
    from labkit.checkpoint.convert.resharding import reshard
    from labkit.checkpoint.data.read import Reader
    from labkit.checkpoint.errors import (
        AmbiguousCheckpointError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointFormatError,
        CheckpointMismatchError,
        CheckpointNotFoundError,
        CheckpointWriteError,
        CorruptCheckpointError,
        DtypeNarrowingError,
        FQNMismatchError,
        IncompleteCheckpointError,
        RankDivergenceError,
        UnsafeCheckpointError,
        UnsavableStateError,
        VerificationError,
    )
    from labkit.checkpoint.formats.catalog import open_checkpoint
    from labkit.checkpoint.index.model import Checkpoint, Chunk, TensorEntry, ValueEntry
    from labkit.checkpoint.index.names import canonical_fqn
    from labkit.checkpoint.state.modules import module_state
    from labkit.checkpoint.state.optimizers import optimizer_state
    from labkit.checkpoint.state.state import PerRank, Rng
    from labkit.checkpoint.store.loading import LoadReport, load
    from labkit.checkpoint.store.saving import PendingSave, save, save_async
    from labkit.checkpoint.views.table import show

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "checks.findings": "Finding Report",
        "checks.verification": "verify",
        "convert.engine": "Result",
        "convert.migration": "migrate",
        "convert.rename": "read_rules",
        "convert.resharding": "reshard",
        "data.read": "Reader",
        "errors": (
            "AmbiguousCheckpointError CheckpointError CheckpointExistsError CheckpointFormatError "
            "CheckpointMismatchError CheckpointNotFoundError CheckpointWriteError CorruptCheckpointError "
            "DtypeNarrowingError FQNMismatchError IncompleteCheckpointError RankDivergenceError "
            "UnsafeCheckpointError UnsavableStateError VerificationError"
        ),
        "formats.catalog": "open_checkpoint",
        "index.model": "Checkpoint Chunk TensorEntry ValueEntry",
        "index.names": "canonical_fqn",
        "state.modules": "module_state",
        "state.optimizers": "optimizer_state",
        "state.state": "PerRank Rng",
        "store.loading": "LoadReport load",
        "store.saving": "PendingSave save save_async",
        "views.table": "show",
    },
)
