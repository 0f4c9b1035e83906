"""Records of events in FSDP's runtimes, and of collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.spmd.trace.collectives import count_collectives
    from labkit.spmd.trace.events import first_difference
    from labkit.spmd.trace.fsdp_mapping import ARGUMENTS
    from labkit.spmd.trace.gloo_links import can_measure_links, measure_links
    from labkit.spmd.trace.recorder import record_events
    from labkit.spmd.trace.reshard_trace import trace_input_reshard

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "collectives": "count_collectives",
        "events": "first_difference",
        "fsdp_mapping": "ARGUMENTS",
        "gloo_links": "can_measure_links measure_links",
        "recorder": "record_events",
        "reshard_trace": "trace_input_reshard",
    },
)
