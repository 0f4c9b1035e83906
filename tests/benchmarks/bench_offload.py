"""Labkit's offload against its roofline on a slow bus: one machine, one run, ratios only. The aims for a GPU are in
tests/gpu/test_offload.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from labkit.spmd.memory.kinds import held_memory, measured_peak
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import ModelConfig, next_token_loss
from labkit.spmd.offload.measure import apply_plan, measure_blocks, measure_bus, measure_seconds
from labkit.spmd.offload.plan import Choice, OffloadPlan, Setting, predict
from labkit.spmd.offload.slow_bus import SlowBus
from tests.benchmarks.table import Figures

CPU = torch.device("cpu")
CONFIG = ModelConfig(dim=64, num_layers=8, hidden_dim=192)
IN_FLIGHT = 4 << 20
MB_PER_S = (60, 200, 3000)


@pytest.fixture(scope="module")
def figures() -> Iterator[Figures]:
    gathered = Figures("Offload against its roofline, 8 blocks, 1,024 tokens, one process")
    yield gathered
    gathered.finish()


def prepared(plan: OffloadPlan | None = None, bus: SlowBus | None = None) -> object:
    """A step of a model that carries out a plan."""
    model = build_model(CONFIG)
    if plan is not None:
        apply_plan(model.layers, plan, min_bytes=4096, max_in_flight_bytes=IN_FLIGHT, transfer=bus)
    batch = next(BatchSampler(batch_size=8, seq_len=128))

    def step() -> None:
        next_token_loss(model, batch).backward()
        model.zero_grad()

    return model, step


@pytest.mark.parametrize("mb_per_s", MB_PER_S)
def test_step_and_peak_against_the_prediction(figures: Figures, mb_per_s: int) -> None:
    torch.set_num_threads(1)
    bus = SlowBus(mb_per_s * 1e6)
    model, step = prepared()  # type: ignore[misc]
    costs = measure_blocks(model.layers, step, repeats=5)
    plain_s, plain_peak = measure_seconds(step, CPU, repeats=5), measured_peak(step, CPU, held_memory(model).total)
    rest_s = max(0.0, plain_s - sum(cost.forward_s + cost.backward_s for cost in costs))
    fixed = plain_peak - sum(cost.saved_bytes for cost in costs)
    setting = Setting(measure_bus(CPU, bus, size_bytes=8 << 20), fixed, rest_s, IN_FLIGHT)
    plan = predict(costs, [Choice.MOVE] * 7 + [Choice.KEEP], setting)
    model, step = prepared(plan, bus)  # type: ignore[misc]
    step_s, peak = measure_seconds(step, CPU, repeats=5), measured_peak(step, CPU, held_memory(model).total)
    bus.close()
    decides = "the bus decides" if plan.step_s > 1.05 * plain_s else "computation decides"
    against = f"{1000 * plan.step_s:.0f} ms predicted, {1000 * plain_s:.0f} ms without offload"
    figures.add(f"{mb_per_s} MB/s: step over prediction", f"{step_s / plan.step_s:.2f}", against, f"at most 1.10; {decides}")
    figures.add(
        f"{mb_per_s} MB/s: peak over prediction",
        f"{peak / plan.peak_bytes:.2f}",
        f"without offload {plain_peak / peak:.1f} times",
        "at most 1.05",
    )
