"""Offload of activations to host memory, with measurements and planning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.base.lazy import lazy_names

if TYPE_CHECKING:
    from labkit.spmd.offload.context import ActivationOffload
    from labkit.spmd.offload.measure import apply_plan, measure_blocks, measure_bus, measure_seconds
    from labkit.spmd.offload.plan import Bus, Choice, PlanError, Setting, plan_blocks, predict, roofline_seconds
    from labkit.spmd.offload.slow_bus import SlowBus
    from labkit.spmd.offload.transfer import CountingTransfer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "context": "ActivationOffload",
        "measure": "apply_plan measure_blocks measure_bus measure_seconds",
        "plan": "Bus Choice PlanError Setting plan_blocks predict roofline_seconds",
        "slow_bus": "SlowBus",
        "transfer": "CountingTransfer",
    },
)
