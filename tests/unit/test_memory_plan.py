"""The predicted peak of a step is within 5 % of torch's tracker, on any mesh, in each precision, recomputed or not."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.spmd.memory.kinds import tracked_peak
from labkit.spmd.memory.predict import PARTS, Sharding, StepSizes, measure_sizes, predict_peak
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import ModelConfig, Transformer, next_token_loss
from labkit.spmd.offload.plan import BlockCost, Choice

CONFIG = ModelConfig(dim=64, num_layers=4, hidden_dim=192, max_seq_len=64)
BATCH = next(BatchSampler(batch_size=3, seq_len=64))
WORLD = 8


@pytest.fixture
def ranks() -> Iterator[None]:
    """One of eight ranks, without the others; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def training(model: Transformer) -> tuple[torch.optim.Optimizer, functools.partial[None]]:
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step() -> None:
        next_token_loss(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return optimizer, functools.partial(step)


@functools.cache
def sizes_in(dtype: torch.dtype) -> StepSizes:
    model = build_model(CONFIG).to(dtype)
    return measure_sizes(model, list(model.layers), *training(model))


@pytest.mark.parametrize("recomputed", [0, 3], ids=["keep", "recompute"])
@pytest.mark.parametrize("precision", ["float32", "mixed", "bfloat16"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_predicted_peak_is_the_trackers(ranks: None, replicas: int, precision: str, recomputed: int) -> None:
    stored = torch.bfloat16 if precision == "bfloat16" else torch.float32
    computed = torch.float32 if precision == "float32" else torch.bfloat16
    mesh = init_device_mesh("cpu", (replicas, WORLD // replicas), mesh_dim_names=("replicate", "shard"))
    model = build_model(CONFIG).to(stored)
    policy = MixedPrecisionPolicy(param_dtype=computed)
    for place, block in enumerate(model.layers):
        if place < recomputed:
            checkpoint(block)
        fully_shard(block, mesh=mesh if replicas > 1 else mesh["shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh if replicas > 1 else mesh["shard"], mp_policy=policy)
    optimizer, step = training(model)
    tracked = tracked_peak(model, optimizer, (BATCH,), step)

    choices = [Choice.RECOMPUTE] * recomputed + [Choice.KEEP] * (4 - recomputed)
    sharding = Sharding(WORLD // replicas, stored.itemsize, computed.itemsize)
    predicted = predict_peak(sizes_in(computed), choices, sharding)
    assert sum(predicted.values()) == pytest.approx(tracked.total, rel=0.05)
    assert predicted["optimizer"] == pytest.approx(tracked.optimizer, rel=0.01)


SIZES = StepSizes((100, 100, 100), 40, tuple(BlockCost(1.0, 2.0, 1000, 10, 300) for _ in range(3)), head_bytes=350)
ALONE = Sharding()


def test_one_rank_gathers_nothing_and_peaks_when_the_loss_is_computed() -> None:
    parts = predict_peak(SIZES, [Choice.KEEP] * 3, Sharding(num_moments=1))
    assert parts == dict(zip(PARTS, (1360, 0, 0, 1360, 3000, 0, 350), strict=True))


def test_with_recomputation_the_peak_is_in_the_first_blocks_backward_when_the_others_gradients_are_there() -> None:
    parts = predict_peak(SIZES, [Choice.RECOMPUTE] * 2 + [Choice.KEEP], ALONE)
    assert parts == dict(zip(PARTS, (1360, 0, 800, 2720, 1000, 0, 300), strict=True))


def test_what_moves_is_in_flight_up_to_the_limit() -> None:
    parts = predict_peak(SIZES, [Choice.MOVE] * 3, ALONE, max_in_flight_bytes=400)
    assert (parts["activations"], parts["in flight"]) == (300, 400)
    parts = predict_peak(SIZES, [Choice.MOVE_INPUTS] * 3, ALONE, max_in_flight_bytes=400)
    assert (parts["activations"], parts["in flight"]) == (1000, 30)


def test_more_ranks_divide_what_is_stored_and_not_what_is_gathered() -> None:
    few, many = (predict_peak(SIZES, [Choice.KEEP] * 3, Sharding(count)) for count in (2, 20))
    assert few["parameters"] == 10 * many["parameters"]
    assert few["gathered"] == many["gathered"] == 4 * 240
    assert few["activations"] == many["activations"]


def test_each_block_needs_a_cost_and_a_choice() -> None:
    with pytest.raises(ValueError, match="2 choices for 3 blocks"):
        predict_peak(SIZES, [Choice.KEEP] * 2, ALONE)
    with pytest.raises(ValueError, match="0 costs for 1 blocks"):
        StepSizes((100,), 0, (), 0)
