"""Seed rows S2.1 to S2.3 on GPUs, with the scenarios of tests/process, and the check of notebook 03 that needs ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from labkit.course.labs import lab03
from tests.notebooks.test_lab03_exercises import IMPORTS, exercise
from tests.process.s2_scenarios import SIZES, Form, both_state_dicts, full_on_rank_0, load_in_fsdp2, train_fsdp1_and_save

pytestmark = pytest.mark.gpu(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(2, device="cuda") as pool:
        yield pool


@pytest.mark.parametrize("reshard", [True, False], ids=["blocks_freed", "blocks_kept_whole"])
@pytest.mark.parametrize("size", SIZES)
def test_s2_1_both_state_dicts_agree_after_a_forward(pool: labkit.WorkerPool, size: int, reshard: bool) -> None:
    for parity, kinds, whole in pool.run(both_state_dicts, "cuda", size, reshard).values():
        assert parity, parity
        assert kinds == ["DTensor"]
        assert whole is not reshard


def test_s2_2_the_full_offloaded_state_is_on_the_cpu_of_rank_0(pool: labkit.WorkerPool) -> None:
    found = pool.run(full_on_rank_0, "cuda")
    assert found[0].parity, found[0].parity
    assert found[0].devices == ["cpu"]
    assert found[1].num_entries == 0


def save(form: Form, folder: str) -> list[float]:
    import torch.distributed as dist

    return train_fsdp1_and_save(dist.get_rank(), "cuda", form, True, folder)


def load(two_axes: bool, folder: str) -> object:
    import torch.distributed as dist

    return load_in_fsdp2(dist.get_rank(), "cuda", two_axes, folder)


@pytest.mark.parametrize("two_axes", [False, True], ids=["2_to_2", "2_to_1x2"])
@pytest.mark.parametrize("form", ["FULL", "SHARDED"])
def test_s2_3_what_fsdp1_saved_is_fsdp2_s_state_exactly_and_trains_on(
    pool: labkit.WorkerPool, form: Form, two_axes: bool, tmp_path: Path
) -> None:
    truth = pool.run(save, form, str(tmp_path), timeout_s=90)[0]
    for found in pool.run(load, two_axes, str(tmp_path), timeout_s=90).values():
        assert found.weights, found.weights
        assert found.moments, found.moments
        assert found.losses == pytest.approx(truth, abs=1e-4)


def test_lab_03_s_strategies_are_fsdp1_s(pool: labkit.WorkerPool) -> None:
    pool.run_cell(IMPORTS)
    pool.run_cell(exercise("shard_like"))
    assert lab03.check_shard_like(pool).startswith("Solved: ")
