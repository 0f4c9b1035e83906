"""Seed rows S0.1 to S0.4 on GPUs, with the scenarios that tests/process runs on gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from labkit.course.labs import lab01
from labkit.spmd.model.initialize import build_model
from tests.notebooks.test_lab01_exercises import exercise
from tests.process.s0_scenarios import LOAD_PATHS, UNEVEN, LoadPath, plain_parameters_drift, round_trip, train_mixed

pytestmark = pytest.mark.gpu(1)

KEYS = set(build_model(UNEVEN).state_dict())


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(2, device="cuda") as pool:
        yield pool


@pytest.mark.parametrize("path", LOAD_PATHS)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("by_policy", id="s0_1_root_by_policy"),
        pytest.param("submodules_only", id="s0_2_submodules_only"),
        pytest.param("blocks_ignoring_the_first", id="s0_3_a_block_ignored"),
        pytest.param("mixed_hsdp", id="s0_4_mixed_hsdp"),
        pytest.param("mixed_replicate", id="s0_4_mixed_replicate"),
        pytest.param("mixed_ddp", id="s0_4_mixed_ddp"),
    ],
)
def test_saves_the_local_state_and_reloads_it(pool: labkit.WorkerPool, shape: str, path: LoadPath, tmp_path: Path) -> None:
    trip = pool.run(round_trip, "cuda", shape, path, str(tmp_path / "checkpoint"), timeout_s=90).same()
    assert trip.saved, trip.saved
    assert {difference.key for difference in trip.zeroed.differences} == KEYS
    assert trip.loaded, trip.loaded
    assert trip.outputs_equal
    assert trip.tied
    assert trip.rank_zero_only


def test_s0_2_the_plain_rest_drifts_apart_in_training(pool: labkit.WorkerPool) -> None:
    assert pool.run(plain_parameters_drift, "cuda").same() > 1e-4


@pytest.mark.parametrize("shape", ["mixed_hsdp", "mixed_replicate", "mixed_ddp"])
def test_s0_4_a_mixed_model_trains_like_the_sharded_one(pool: labkit.WorkerPool, shape: str) -> None:
    losses, parity = pool.run(train_mixed, "cuda", shape, 3, timeout_s=90).same()
    assert parity, parity
    assert losses[-1] < losses[0]


def test_lab_01_s_solution_resumes_bit_for_bit(pool: labkit.WorkerPool) -> None:
    pool.run_cell("from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict\n" + exercise("AppState"))
    assert "5 later losses equal bit for bit" in lab01.check_app_state(pool)
