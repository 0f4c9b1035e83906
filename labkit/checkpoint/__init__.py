"""Checkpoint tools: look, verify, migrate, reshard, and a save that cannot lose the last good one.

Usable without a notebook and without a pool; ``labkit checkpoint`` is the same on the command line.
"""

from __future__ import annotations

from labkit.checkpoint.catalog import open_checkpoint
from labkit.checkpoint.model import Checkpoint, Chunk, TensorEntry, ValueEntry
from labkit.checkpoint.names import canonical_fqn
from labkit.checkpoint.read import Reader

__all__ = ["Checkpoint", "Chunk", "Reader", "TensorEntry", "ValueEntry", "canonical_fqn", "open_checkpoint"]
