"""The planner finds the optimum, its predictions can be checked by hand, and plans can be carried out."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit.spmd.memory.kinds import held_memory, measured_peak
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import ModelConfig, Transformer, next_token_loss
from labkit.spmd.offload.context import ActivationOffload
from labkit.spmd.offload.measure import apply_plan, measure_blocks, measure_bus
from labkit.spmd.offload.plan import BlockCost, Bus, Choice, OffloadPlan, PlanError, Setting, plan_blocks, predict, roofline_seconds
from labkit.spmd.offload.slow_bus import SlowBus

CPU = torch.device("cpu")
CONFIG = ModelConfig(dim=32, num_layers=5, num_heads=2, hidden_dim=96, max_seq_len=64)
KEEP, RECOMPUTE, MOVE, INPUTS = Choice
ONE = BlockCost(forward_s=1.0, backward_s=2.0, saved_bytes=100, input_bytes=10)


def setting(rate: float = 50.0, fixed: int = 7, rest: float = 0.5, in_flight: int = 20) -> Setting:
    return Setting(Bus(rate, 2 * rate), fixed, rest, in_flight)


@pytest.fixture
def bus() -> Iterator[SlowBus]:
    slow = SlowBus(50e6)
    yield slow
    slow.close()


# Predictions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "forward_s", "backward_s", "peak_bytes", "moved_bytes"),
    [
        ((KEEP, KEEP, KEEP), 3.0, 6.0, 7 + 300, 0),
        ((RECOMPUTE, RECOMPUTE, RECOMPUTE), 3.0, 9.0, 7 + 120, 0),
        ((RECOMPUTE, RECOMPUTE, KEEP), 3.0, 8.0, 7 + 120, 0),
        ((MOVE, MOVE, MOVE), 5.6, 6.0, 7 + 20, 300),
        ((MOVE, MOVE, KEEP), 4.6, 6.0, 7 + 100 + 20, 200),
        ((INPUTS, INPUTS, INPUTS), 3.0, 9.0, 7 + 100 + 20, 30),
        ((KEEP, MOVE, RECOMPUTE), 3.6, 7.0, 7 + 200 + 20, 100),
    ],
)
def test_a_prediction_follows_the_bytes_from_block_to_block(
    choices: tuple[Choice, ...], forward_s: float, backward_s: float, peak_bytes: int, moved_bytes: int
) -> None:
    plan = predict([ONE] * 3, choices, setting())
    assert (plan.forward_s, plan.backward_s) == pytest.approx((forward_s, backward_s))
    assert plan.step_s == pytest.approx(forward_s + backward_s + 0.5)
    assert (plan.peak_bytes, plan.moved_bytes) == (peak_bytes, moved_bytes)


@settings(max_examples=30)
@given(bytes_each=st.integers(0, 300), rate=st.floats(1.0, 300.0), in_flight=st.integers(0, 400))
def test_no_prediction_is_below_the_roofline(bytes_each: int, rate: float, in_flight: int) -> None:
    blocks = [BlockCost(1.0, 2.0, bytes_each, 0)] * 4
    for choices in product((KEEP, MOVE), repeat=4):
        plan = predict(blocks, choices, setting(rate, in_flight=in_flight))
        bound = roofline_seconds(blocks, plan.moved_bytes, setting(rate, in_flight=in_flight))
        assert plan.step_s >= bound * (1 - 1e-12)
        if len(set(choices)) == 1:  # equal blocks keep the bus equally busy
            assert plan.step_s == pytest.approx(bound)


costs = st.lists(
    st.builds(
        lambda f, b, saved, part: BlockCost(f, b, saved, int(saved * part)),
        st.floats(0.1, 3.0),
        st.floats(0.1, 5.0),
        st.integers(1, 60),
        st.floats(0.0, 1.0),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40)
@given(blocks=costs, rate=st.floats(1.0, 200.0), limit=st.integers(0, 200), in_flight=st.integers(0, 40))
def test_no_choice_is_faster_within_the_limit(blocks: list[BlockCost], rate: float, limit: int, in_flight: int) -> None:
    given_ = setting(rate, 3, 0.1, in_flight)
    every = [predict(blocks, choices, given_) for choices in product(Choice, repeat=len(blocks))]
    fitting = [plan for plan in every if plan.peak_bytes <= limit]
    if fitting:
        found = plan_blocks(blocks, given_, limit_bytes=limit)
        assert found.step_s == pytest.approx(min(plan.step_s for plan in fitting))
        assert found.peak_bytes <= limit
        assert found == predict(blocks, found.choices, given_)
    else:
        with pytest.raises(PlanError, match=rf"the least possible peak is {min(plan.peak_bytes for plan in every)} bytes"):
            plan_blocks(blocks, given_, limit_bytes=limit)


def test_the_roofline_is_flat_up_to_what_may_be_under_way_and_what_computation_hides() -> None:
    blocks, where = [ONE] * 4, setting(rate=50.0, in_flight=20)
    knee = 20 + 4 * ONE.forward_s * 50.0
    assert roofline_seconds(blocks, knee, where) == pytest.approx(roofline_seconds(blocks, 0, where))
    assert roofline_seconds(blocks, knee + 50, where) == pytest.approx(roofline_seconds(blocks, 0, where) + 1.0)


def test_with_room_for_all_everything_is_kept() -> None:
    assert plan_blocks([ONE] * 4, setting(), limit_bytes=407).choices == (KEEP,) * 4


def test_the_last_block_is_kept_before_any_other() -> None:
    """A block's activations are in memory while it runs, whatever the choice."""
    plan = plan_blocks([ONE] * 4, setting(rate=1e-3), limit_bytes=7 + 130)
    assert plan.choices == (RECOMPUTE, RECOMPUTE, RECOMPUTE, KEEP)


def test_a_fast_bus_moves_and_a_slow_one_recomputes() -> None:
    limit = 7 + 145
    fast, slow = (plan_blocks([ONE] * 4, setting(rate=rate), limit_bytes=limit) for rate in (1e6, 1e-3))
    assert MOVE in fast.choices
    assert fast.step_s == pytest.approx(12.5)
    assert MOVE not in slow.choices
    assert RECOMPUTE in slow.choices


def test_a_hundred_blocks_are_planned_within_seconds() -> None:
    began_s = time.monotonic()
    plan = plan_blocks([ONE] * 100, setting(rate=30.0), limit_bytes=2000)
    assert plan.peak_bytes <= 2000
    assert time.monotonic() - began_s < 30


def test_a_plan_for_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match="no block"):
        plan_blocks([], setting(), limit_bytes=1)


# Measured -------------------------------------------------------------------------------------------------------------


def batch() -> Tensor:
    return next(BatchSampler(batch_size=2, seq_len=64))


def gradients(model: Transformer) -> list[Tensor]:
    next_token_loss(model, batch()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_blocks_are_measured_in_bytes_and_seconds() -> None:
    model = build_model(CONFIG)
    began_s = time.perf_counter()
    measured = measure_blocks(model.layers, lambda: next_token_loss(model, batch()).backward(), repeats=2)
    whole_s = time.perf_counter() - began_s
    assert len(measured) == CONFIG.num_layers
    with ActivationOffload(model.layers, min_bytes=1) as offload:
        next_token_loss(model, batch()).backward()
    tables = 2 * model.rope_cos.nbytes  # saved by every block, yet one storage: alone, each block counts it
    assert sum(cost.saved_bytes for cost in measured) == offload.counts.moved_bytes + (CONFIG.num_layers - 1) * tables
    assert {cost.input_bytes for cost in measured} == {2 * 64 * CONFIG.dim * 4}
    assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in measured)
    assert sum(cost.forward_s + cost.backward_s for cost in measured) < whole_s
    assert not model.layers[0]._forward_hooks
    assert not model.layers[0]._forward_pre_hooks


@pytest.mark.parametrize("choice", Choice)
def test_a_plan_carried_out_gives_the_same_gradients_and_the_predicted_bytes(choice: Choice, bus: SlowBus) -> None:
    model = build_model(CONFIG)
    measured = measure_blocks(model.layers, lambda: next_token_loss(model, batch()).backward(), repeats=1)
    plan = predict(measured, [choice] * 4 + [KEEP], setting())
    changed = build_model(CONFIG)
    offload = apply_plan(changed.layers, plan, min_bytes=1, transfer=bus)
    for left, right in zip(gradients(changed), gradients(build_model(CONFIG)), strict=True):
        assert torch.equal(left, right)
    assert (offload is not None) == (choice in (MOVE, INPUTS))
    if offload is not None:
        # The rotary tables do not belong to a block, so they move as well, once for all blocks.
        tables = 2 * model.rope_cos.nbytes
        assert offload.counts.moved_bytes == plan.moved_bytes - (3 * tables if choice is MOVE else -tables)


def test_the_predicted_peak_is_the_measured_one(bus: SlowBus) -> None:
    def peak_of(choices: list[Choice]) -> tuple[int, OffloadPlan | None]:
        model = build_model(CONFIG)

        def step() -> None:
            next_token_loss(model, batch()).backward()
            model.zero_grad()

        plan = predict(known, choices, Setting(Bus(1.0, 1.0), fixed, 0.0, 100_000)) if known else None
        if plan:
            apply_plan(model.layers, plan, min_bytes=1, max_in_flight_bytes=100_000, transfer=bus)
        step()
        return measured_peak(step, CPU, held_memory(model).total), plan

    known: list[BlockCost] = []
    fixed = 0
    whole, _ = peak_of([KEEP] * 5)
    model = build_model(CONFIG)
    known = measure_blocks(model.layers, lambda: next_token_loss(model, batch()).backward(), repeats=1)
    fixed = whole - sum(cost.saved_bytes for cost in known)
    for choices in ([RECOMPUTE] * 4 + [KEEP], [MOVE] * 4 + [KEEP], [INPUTS] * 4 + [KEEP], [KEEP, MOVE, RECOMPUTE, MOVE, KEEP]):
        measured, plan = peak_of(choices)
        assert plan is not None
        assert measured == pytest.approx(plan.peak_bytes, rel=0.06)
        assert measured < 0.75 * whole


def test_the_bandwidth_of_a_slow_bus_is_measured(bus: SlowBus) -> None:
    measured = measure_bus(CPU, bus, size_bytes=5_000_000, repeats=1)
    assert 10e6 < measured.out_bytes_per_s < 51e6  # a busy machine wakes threads late, never early


def test_a_bus_that_moves_nothing_has_no_bandwidth() -> None:
    with pytest.raises(ValueError, match="there is no bus to measure"):
        measure_bus(CPU)
    with pytest.raises(ValueError, match="positive bandwidth"):
        SlowBus(0.0)


def test_a_closed_bus_leaves_no_thread() -> None:
    before = threading.active_count()
    slow = SlowBus(1e9)
    copy = slow.send(torch.ones(8, dtype=torch.uint8))
    back = slow.fetch(copy)
    slow.wait_fetched(copy)
    assert back.tolist() == [1] * 8
    slow.close()
    assert threading.active_count() == before
