"""Functions that cells call on the ranks: the course's model and text, sharding, shard tables, exact comparisons.

Nothing here depends on a pool or a notebook: every module also works under plain torchrun. Each name below loads its module, and
with it torch, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

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

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "model.initialize": "build_model init_weights",
        "model.text": "BatchSampler english_text",
        "model.training": "train",
        "model.transformer": "Block ModelConfig Transformer next_token_loss",
        "offload.context": "ActivationOffload",
        "shards.parity": "compare require_equal",
        "shards.sharding": "check_optimizer shard_model",
        "shards.tables": "shard_table",
        "trace.collectives": "count_collectives",
        "trace.recorder": "record_events",
    },
)
