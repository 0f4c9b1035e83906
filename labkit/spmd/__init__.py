"""Functions that cells call on the ranks: the course's model and text, sharding, shard tables, exact comparison.

Nothing here depends on a pool or a notebook: every module also works under plain torchrun. Each name below loads its module,
and with it torch, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.spmd.model.initialize import build_model, init_weights
    from labkit.spmd.model.text import BatchSampler, english_text
    from labkit.spmd.model.training import train
    from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss
    from labkit.spmd.offload.context import ActivationOffload
    from labkit.spmd.shards.parity import compare, require_equal
    from labkit.spmd.shards.sharding import check_optimizer, shard_model
    from labkit.spmd.shards.tables import shard_table
    from labkit.spmd.trace.collectives import count_collectives
    from labkit.spmd.trace.recorder import record_events

_HOME = {
    "ActivationOffload": "offload",
    "Block": "model",
    "BatchSampler": "text",
    "ModelConfig": "model",
    "Transformer": "model",
    "build_model": "initialize",
    "check_optimizer": "sharding",
    "compare": "parity",
    "count_collectives": "collectives",
    "english_text": "text",
    "init_weights": "initialize",
    "next_token_loss": "model",
    "record_events": "trace",
    "require_equal": "parity",
    "shard_model": "sharding",
    "shard_table": "shards",
    "train": "training",
}

__all__ = [
    "ActivationOffload",
    "BatchSampler",
    "Block",
    "ModelConfig",
    "Transformer",
    "build_model",
    "check_optimizer",
    "compare",
    "count_collectives",
    "english_text",
    "init_weights",
    "next_token_loss",
    "record_events",
    "require_equal",
    "shard_model",
    "shard_table",
    "train",
]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
