"""The memory of a training step: predicted, measured, and over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.spmd.memory.kinds import held_memory, measured_peak, predict_memory
    from labkit.spmd.memory.predict import Sharding, measure_sizes, predict_peak
    from labkit.spmd.memory.spy import count_forwards, spy_save_on_cpu
    from labkit.spmd.memory.timeline import record_memory

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "kinds": "held_memory measured_peak predict_memory",
        "predict": "Sharding measure_sizes predict_peak",
        "spy": "count_forwards spy_save_on_cpu",
        "timeline": "record_memory",
    },
)
