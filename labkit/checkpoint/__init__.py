"""Checkpoint tools: look, verify, migrate, reshard, and a save that cannot lose the last good one.

Usable without a notebook and without a pool; ``labkit checkpoint`` is the same on the command line.
"""

from __future__ import annotations

from labkit.checkpoint.catalog import open_checkpoint
from labkit.checkpoint.engine import Result
from labkit.checkpoint.errors import (
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
)
from labkit.checkpoint.findings import Finding, Report
from labkit.checkpoint.load import LoadReport, load
from labkit.checkpoint.migrate import migrate
from labkit.checkpoint.model import Checkpoint, Chunk, TensorEntry, ValueEntry
from labkit.checkpoint.modules import module_state
from labkit.checkpoint.names import canonical_fqn
from labkit.checkpoint.optimizers import optimizer_state
from labkit.checkpoint.read import Reader
from labkit.checkpoint.reshard import reshard
from labkit.checkpoint.save import PendingSave, save, save_async
from labkit.checkpoint.show import show
from labkit.checkpoint.state import PerRank, Rng
from labkit.checkpoint.verify import verify

__all__ = [
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
    "ValueEntry",
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
