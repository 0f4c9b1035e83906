"""Pictures for notebooks, each drawn from records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.notebook.pictures.bars import memory_bars
    from labkit.notebook.pictures.collectives import collective_picture, process_picture
    from labkit.notebook.pictures.flat_maps import flat_map
    from labkit.notebook.pictures.losses import loss_curves
    from labkit.notebook.pictures.mappings import mapping_picture
    from labkit.notebook.pictures.memory_timelines import memory_timeline
    from labkit.notebook.pictures.mesh_maps import DiskChunk, block_map, mesh_picture
    from labkit.notebook.pictures.node_maps import node_map
    from labkit.notebook.pictures.plans import draw_plans
    from labkit.notebook.pictures.rooflines import roofline
    from labkit.notebook.pictures.shard_maps import shard_map
    from labkit.notebook.pictures.timelines import timeline

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "bars": "memory_bars",
        "collectives": "collective_picture process_picture",
        "flat_maps": "flat_map",
        "losses": "loss_curves",
        "mappings": "mapping_picture",
        "memory_timelines": "memory_timeline",
        "mesh_maps": "DiskChunk block_map mesh_picture",
        "node_maps": "node_map",
        "plans": "draw_plans",
        "rooflines": "roofline",
        "shard_maps": "shard_map",
        "timelines": "timeline",
    },
)
