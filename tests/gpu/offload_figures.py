"""The table of activation offload at one width: every way of training beside keeping everything and beside its roofline."""

from __future__ import annotations

import importlib.util

import labkit
from labkit.spmd.model.transformer import ModelConfig
from labkit.spmd.offload.plan import Bus
from tests.benchmarks.table import Figures
from tests.gpu.offload_scenarios import PLANNED, TRL, WAYS, Measured, bandwidth, measure, one_way

GIB = 1 << 30
LABKIT = WAYS[3:]


def measure_ways(pool: labkit.WorkerPool, figures: Figures, config: ModelConfig | None = None) -> tuple[dict[str, Measured], Bus]:
    """Measure, add the figures, and return the slower rank's: for each way of training, and for each direction of the bus."""
    both, bus = (min(pool.run(ask, timeout_s=120).values(), key=lambda one: one.out_bytes_per_s) for ask in (bandwidth, one_way))
    figures.add(
        "bus: out alone, back alone",
        f"{bus.out_bytes_per_s / 1e9:.1f}, {bus.back_bytes_per_s / 1e9:.1f} GB/s",
        f"each way while both are in use: {both.out_bytes_per_s / 1e9:.1f} GB/s",
    )
    found: dict[str, Measured] = {}
    for way in (*WAYS, *([TRL] if importlib.util.find_spec("trl") else [])):
        found[way] = slower(pool, way, config)
        add_figures(figures, way, found[way], found["keep"])
    keep, wrapper = found["keep"].timed, found["offload_wrapper"].timed
    limit = (keep.peak_bytes + wrapper.peak_bytes) // 2
    found[PLANNED] = slower(pool, PLANNED, config, limit_bytes=limit, keep_peak_bytes=keep.backward_peak_bytes)
    add_figures(figures, PLANNED, found[PLANNED], found["keep"])
    figures.add(f"{PLANNED}: limit", f"{limit / GIB:.2f} GiB", "halfway between keep's peak and offload_wrapper's")
    for way in LABKIT[:2]:
        bound = roofline_s(found["keep"], found[way], bus)
        figures.add(
            f"{way}: roofline", f"{1000 * bound:.1f} ms", f"step is {found[way].timed.step_s / bound:.3f} of it", "at most 1.10"
        )
    step_s = {way: one.timed.step_s for way, one in found.items()}
    for way in ("labkit", LABKIT[2], PLANNED):
        figures.add(
            f"{way}: faster than offload_wrapper", f"{step_s['offload_wrapper'] / step_s[way]:.2f} times", aim="at least 2.5"
        )
    figures.add("inputs and recompute over recompute", f"{step_s[LABKIT[2]] / step_s['recompute']:.3f}", aim="at most 1.03")
    return found, bus


def slower(pool: labkit.WorkerPool, way: str, config: ModelConfig | None = None, **options: int) -> Measured:
    """The slower rank's figures."""
    return max(pool.run(measure, way, config, timeout_s=240, **options).values(), key=lambda one: one.timed.step_s)


def add_figures(figures: Figures, way: str, one: Measured, keep: Measured) -> None:
    """The lines of one way."""
    parts = f"forward {1000 * one.timed.forward_s:.1f}, backward {1000 * one.timed.backward_s:.1f}"
    figures.add(f"{way}: step", f"{1000 * one.timed.step_s:.1f} ms", f"{parts}; keep {1000 * keep.timed.step_s:.1f} ms")
    before = f"before the optimizer's step {one.timed.backward_peak_bytes / GIB:.2f}"
    figures.add(f"{way}: peak", f"{one.timed.peak_bytes / GIB:.2f} GiB", f"{before}; keep {keep.timed.peak_bytes / GIB:.2f} GiB")
    if one.moved_bytes:
        moved = f"{one.moved_bytes / GIB:.2f} GiB out, {one.fetched_bytes / GIB:.2f} back, {one.num_late} late"
        figures.add(
            f"{way}: moved in a step",
            moved,
            f"pinned {one.host_bytes / GIB:.2f} GiB, by torch's count {one.pinned_bytes / GIB:.2f}",
        )
    elif one.pinned_bytes:
        figures.add(f"{way}: pinned", f"{one.pinned_bytes / GIB:.2f} GiB")
    if one.plan is not None:
        kinds = ", ".join(f"{sum(choice == kind for choice in one.plan.choices)} {kind}" for kind in sorted(set(one.plan.choices)))
        predicted = f"{1000 * one.plan.step_s:.1f} ms without the optimizer, {one.plan.peak_bytes / GIB:.2f} GiB"
        figures.add(f"{way}: predicted", predicted, kinds)


def roofline_s(kept: Measured, moved: Measured, bus: Bus) -> float:
    """The least time of a step: in each direction the slower of bus and computation without offload, plus the optimizer."""
    rest_s = kept.timed.step_s - kept.timed.forward_s - kept.timed.backward_s
    out_s, back_s = moved.moved_bytes / bus.out_bytes_per_s, moved.fetched_bytes / bus.back_bytes_per_s
    return max(kept.timed.forward_s, out_s) + max(kept.timed.backward_s, back_s) + rest_s
