"""Sharding of a model, and descriptions of the shards that each rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.spmd.shards.flat_parameters import flat_shares
    from labkit.spmd.shards.meshes import check_mesh, fsdp1_extended, make_mesh, mesh_record, restore_optimizer, shard_2d
    from labkit.spmd.shards.parity import compare, require_equal
    from labkit.spmd.shards.records import Chunk
    from labkit.spmd.shards.sharding import check_optimizer, shard_model
    from labkit.spmd.shards.tables import shard_table
    from labkit.spmd.shards.tensor_parallel import check_plan, tensor_parallel_plan

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "flat_parameters": "flat_shares",
        "meshes": "check_mesh fsdp1_extended make_mesh mesh_record restore_optimizer shard_2d",
        "parity": "compare require_equal",
        "records": "Chunk",
        "sharding": "check_optimizer shard_model",
        "tables": "shard_table",
        "tensor_parallel": "check_plan tensor_parallel_plan",
    },
)
