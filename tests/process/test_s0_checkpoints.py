"""Seed rows S0.1 to S0.4: a sharded model saves the state of the whole model, and restores it exactly."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from labkit.spmd.model.initialize import build_model
from tests.matrix import matrix
from tests.process.s0_scenarios import (
    LOAD_PATHS,
    UNEVEN,
    LoadPath,
    RoundTrip,
    plain_parameters_drift,
    round_trip,
    train_mixed,
)

KEYS = set(build_model(UNEVEN).state_dict())
MIXED = ("mixed_hsdp", "mixed_replicate", "mixed_ddp")


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def run(pool: labkit.WorkerPool, shape: str, path: LoadPath, folder: Path) -> RoundTrip:
    return pool.run(round_trip, pool.device, shape, path, str(folder / "checkpoint"), timeout_s=90).same()


def check(trip: RoundTrip) -> None:
    assert trip.saved, trip.saved
    assert trip.saved.num_tensors == len(KEYS)
    # A copy that already held the right values would prove nothing about the load.
    assert {difference.key for difference in trip.zeroed.differences} == KEYS
    assert trip.loaded, trip.loaded
    assert trip.loaded.num_tensors == len(KEYS)
    assert trip.outputs_equal
    assert trip.tied
    assert trip.rank_zero_only


@pytest.mark.parametrize("path", LOAD_PATHS)
def test_s0_1_root_sharded_by_policy_saves_the_local_state_and_reloads_it(
    pool: labkit.WorkerPool, path: LoadPath, tmp_path: Path
) -> None:
    check(run(pool, "by_policy", path, tmp_path))


def test_s0_1_the_old_composable_spelling_is_gone() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("torch.distributed._composable.fully_shard")
    assert not hasattr(importlib.import_module("torch.distributed._composable"), "fully_shard")


@pytest.mark.parametrize("path", LOAD_PATHS)
def test_s0_2_only_submodules_sharded_saves_the_local_state_and_reloads_it(
    pool: labkit.WorkerPool, path: LoadPath, tmp_path: Path
) -> None:
    check(run(pool, "submodules_only", path, tmp_path))


def test_s0_2_the_plain_rest_drifts_apart_in_training(pool: labkit.WorkerPool) -> None:
    assert pool.run(plain_parameters_drift, pool.device).same() > 1e-4


@pytest.mark.parametrize("path", ["full", "sharded", "dcp"])
@pytest.mark.parametrize("shape", ["by_policy", "blocks_ignoring_the_first"], ids=["none_ignored", "a_block_ignored"])
def test_s0_3_tied_weights_and_buffers_survive_save_zero_and_load(
    pool: labkit.WorkerPool, shape: str, path: LoadPath, tmp_path: Path
) -> None:
    check(run(pool, shape, path, tmp_path))


@pytest.mark.parametrize("path", ["full", "sharded", "dcp"])
@pytest.mark.parametrize("shape", MIXED)
def test_s0_4_a_sharded_block_in_a_replicated_model_saves_the_local_state_and_reloads_it(
    pool: labkit.WorkerPool, shape: str, path: LoadPath, tmp_path: Path
) -> None:
    check(run(pool, shape, path, tmp_path))


@pytest.mark.parametrize("shape", MIXED)
def test_s0_4_a_mixed_model_trains_like_the_sharded_one(pool: labkit.WorkerPool, shape: str) -> None:
    losses, parity = pool.run(train_mixed, pool.device, shape, 3, timeout_s=90).same()
    assert parity, parity
    assert losses[-1] < losses[0]
