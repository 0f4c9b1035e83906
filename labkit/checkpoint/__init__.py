"""Checkpoint tools: look, verify, migrate, reshard, and a save that cannot lose the last good checkpoint.

They work without a notebook and without a pool; ``labkit checkpoint`` offers the same on the command line. Each name below loads
its module when it is first used, so that looking into a checkpoint does not import the code that writes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.checkpoint.convert.engine import Result
    from labkit.checkpoint.convert.migration import migrate
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
    from labkit.checkpoint.show.table import show
    from labkit.checkpoint.state.modules import module_state
    from labkit.checkpoint.state.optimizers import optimizer_state
    from labkit.checkpoint.state.state import PerRank, Rng
    from labkit.checkpoint.store.loading import LoadReport, load
    from labkit.checkpoint.store.saving import PendingSave, save, save_async
    from labkit.checkpoint.verify.findings import Finding, Report
    from labkit.checkpoint.verify.verification import verify

# Modules must not share a name with the functions they export: importing the module would shadow the function.
_HOME = {
    "AmbiguousCheckpointError": "errors",
    "Checkpoint": "model",
    "CheckpointError": "errors",
    "CheckpointExistsError": "errors",
    "CheckpointFormatError": "errors",
    "CheckpointMismatchError": "errors",
    "CheckpointNotFoundError": "errors",
    "CheckpointWriteError": "errors",
    "Chunk": "model",
    "CorruptCheckpointError": "errors",
    "DtypeNarrowingError": "errors",
    "FQNMismatchError": "errors",
    "Finding": "findings",
    "IncompleteCheckpointError": "errors",
    "LoadReport": "loading",
    "PendingSave": "saving",
    "PerRank": "state",
    "RankDivergenceError": "errors",
    "Reader": "read",
    "Report": "findings",
    "Result": "engine",
    "Rng": "state",
    "TensorEntry": "model",
    "UnsafeCheckpointError": "errors",
    "UnsavableStateError": "errors",
    "ValueEntry": "model",
    "VerificationError": "errors",
    "canonical_fqn": "names",
    "load": "loading",
    "migrate": "migration",
    "module_state": "modules",
    "open_checkpoint": "catalog",
    "optimizer_state": "optimizers",
    "reshard": "resharding",
    "save": "saving",
    "save_async": "saving",
    "show": "table",
    "verify": "verification",
}

__all__ = [
    "AmbiguousCheckpointError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "Chunk",
    "CorruptCheckpointError",
    "DtypeNarrowingError",
    "FQNMismatchError",
    "Finding",
    "IncompleteCheckpointError",
    "LoadReport",
    "PendingSave",
    "PerRank",
    "RankDivergenceError",
    "Reader",
    "Report",
    "Result",
    "Rng",
    "TensorEntry",
    "UnsafeCheckpointError",
    "UnsavableStateError",
    "ValueEntry",
    "VerificationError",
    "canonical_fqn",
    "load",
    "migrate",
    "module_state",
    "open_checkpoint",
    "optimizer_state",
    "reshard",
    "save",
    "save_async",
    "show",
    "verify",
]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
