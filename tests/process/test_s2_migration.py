"""Seed rows S2.1 to S2.3: the state of FSDP2 is the same in every form, and FSDP1's is migrated exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from tests.matrix import matrix
from tests.process.checkpoint_ranks import Launcher, launcher_fixture  # noqa: F401
from tests.process.s2_scenarios import (
    SIZES,
    UNEVEN,
    Form,
    both_state_dicts,
    full_on_rank_0,
    load_in_fsdp2,
    train_fsdp1_and_save,
)

NUM_PARAMETERS = 2 + 9 * UNEVEN.num_layers  # embedding and norm, and nine in a block
NUM_CONSTANT = 1 + 2 * UNEVEN.num_layers  # norms begin with ones, whatever the seed


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


@pytest.mark.parametrize("reshard", [True, False], ids=["blocks_freed", "blocks_kept_whole"])
@pytest.mark.parametrize("size", SIZES)
def test_s2_1_the_module_s_state_dict_is_the_one_of_the_api_also_after_a_forward(
    pool: labkit.WorkerPool, size: int, reshard: bool
) -> None:
    for parity, kinds, whole in pool.run(both_state_dicts, pool.device, size, reshard).values():
        assert parity, parity
        assert parity.num_tensors == 4
        assert kinds == ["DTensor"]
        assert whole is not reshard  # otherwise the case after a forward was not tried


def test_s2_2_the_full_offloaded_state_is_whole_on_rank_0_and_nowhere_else(pool: labkit.WorkerPool) -> None:
    found = pool.run(full_on_rank_0, pool.device)
    assert found[0].parity, found[0].parity
    assert found[0].devices == ["cpu"]
    assert found[0].plain
    assert found[0].num_entries == NUM_PARAMETERS + 3  # the head's own name, and two tables
    assert [found[rank].num_entries for rank in range(1, pool.world_size)] == [0] * (pool.world_size - 1)


def gap(losses: list[float], truth: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, truth, strict=True))


MOVES = {
    "2_to_2": (2, 2, False),
    "2_to_4": (2, 4, False),
    "4_to_2": (4, 2, False),
    "4_to_3": (4, 3, False),
    "2_to_2x2": (2, 4, True),
    "2_to_1x2": (2, 2, True),
}
# FULL holds whole tensors, however many ranks saved it, so fewer moves are enough for it.
CASES = [
    *matrix(("SHARDED", "4_to_3"), *(("SHARDED", move) for move in MOVES if move != "4_to_3")),
    *matrix(("FULL", "2_to_2"), ("FULL", "4_to_3"), ("FULL", "2_to_1x2")),
]


@pytest.mark.parametrize(("form", "move"), CASES)
def test_s2_3_what_fsdp1_saved_with_dcp_is_fsdp2_s_state_exactly_and_trains_on(
    launcher: Launcher, tmp_path: Path, form: Form, move: str
) -> None:
    old_ranks, new_ranks, two_axes = MOVES[move]
    truth = launcher.run(train_fsdp1_and_save, old_ranks, tmp_path, "cpu", form, True, str(tmp_path))[0]
    for found in launcher.run(load_in_fsdp2, new_ranks, tmp_path, "cpu", two_axes, str(tmp_path)):
        # All except the tables, and the norms, which training moved away from one.
        assert found.untouched >= NUM_PARAMETERS - NUM_CONSTANT
        assert found.weights, found.weights
        assert found.weights.num_tensors == NUM_PARAMETERS + 3
        assert found.moments, found.moments
        assert found.moments.num_tensors == 3 * NUM_PARAMETERS
        assert found.learning_rate == 1e-2
        if (old_ranks, new_ranks, two_axes) == (2, 2, False):
            assert found.losses == truth  # two numbers have one sum
        else:
            assert gap(found.losses, truth) < 1e-4


def test_s2_3_flat_parameters_without_their_original_names_come_over_as_well(launcher: Launcher, tmp_path: Path) -> None:
    truth = launcher.run(train_fsdp1_and_save, 2, tmp_path, "cpu", "SHARDED", False, str(tmp_path))[0]
    for found in launcher.run(load_in_fsdp2, 2, tmp_path, "cpu", False, str(tmp_path)):
        assert found.weights, found.weights
        assert found.moments, found.moments
        assert found.losses == truth
