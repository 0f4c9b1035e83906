"""Seed rows S4.1 to S4.7: FSDP over tensor parallelism, its saved state, and the silent mistakes of torch.

With two ranks one of the two axes has a single rank. FSDP2 runs there too. FSDP1 over a dp axis of one rank shards nothing, and
with ``use_orig_params=True`` torch cannot run it over TP; cases that need both axes are tested with four ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from labkit.errors import RankFailedError
from labkit.spmd.model.initialize import build_model
from tests.matrix import matrix
from tests.process.s4_restores import (
    Reshard,
    first_half_twice,
    kept_bytes,
    optimizer_round_trip,
    refused_restore,
    reshape,
    reshard_gradients,
    save_train_load,
    saved_tensors,
)
from tests.process.s4_scenarios import (
    CONFIGS,
    INSIDE,
    OUTSIDE,
    Api,
    Order,
    composition,
    extensions,
    refusals,
    sharded_state,
    train_beside_1d,
)

KEYS = list(build_model(CONFIGS["even"]).state_dict())
FSDP1: tuple[Api, ...] = ("fsdp1", "fsdp1_orig")
APIS: tuple[Api, ...] = ("fsdp2", *FSDP1)
COLUMN_CUT = {"layers.0.attention.wo.weight", "layers.0.feed_forward.w2.weight"}
ROW_CUT = {
    f"layers.0.{name}.weight" for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
}


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


on_two = pytest.mark.parametrize("pool", [2], indirect=True)
on_four = pytest.mark.parametrize("pool", [4], indirect=True)


def dp(pool: labkit.WorkerPool) -> int:
    """Ranks on the dp axis: always two on tp."""
    return pool.world_size // 2


# S4.1 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [OUTSIDE, INSIDE], ids=["dp_outside", "dp_inside"])
def test_s4_1_fsdp2_saves_right_weights_on_either_order_of_the_axes(pool: labkit.WorkerPool, order: Order, tmp_path: Path) -> None:
    outputs, loaded = pool.run(composition, pool.device, dp(pool), "fsdp2", order, str(tmp_path / "saved"), timeout_s=60)[0]
    assert outputs, outputs
    assert loaded, loaded


def test_s4_1_labkit_refuses_the_wrong_order_for_fsdp1_and_for_nothing_else(pool: labkit.WorkerPool) -> None:
    said = pool.run(refusals, pool.device, dp(pool)).same()
    assert [name for name, text in said.items() if text] == [f"FSDP1 {INSIDE}"]
    assert "'dp' is inside 'tp'" in said[f"FSDP1 {INSIDE}"]
    assert "wrong weights, without an error" in said[f"FSDP1 {INSIDE}"]


# S4.2 ------------------------------------------------------------------------------------------------------------------


def test_s4_2_the_2d_extension_is_on_for_fsdp1_over_tp_and_off_elsewhere(pool: labkit.WorkerPool) -> None:
    found = pool.run(extensions, pool.device, dp(pool), timeout_s=60).same()
    assert found["fsdp1 2d"][:2] == ([""], [""])
    assert found["fsdp1 1d"][:2] == ([], [])
    assert found["fsdp2 2d"] == ([], [], "(_StridedShard(dim=0, sf=2), Shard(dim=0))")


def test_s4_2_the_extension_alone_is_not_tensor_parallelism(pool: labkit.WorkerPool) -> None:
    extended, over_tp, _ = pool.run(extensions, pool.device, dp(pool), timeout_s=60).same()["fsdp1 on an axis without tp"]
    assert (extended, over_tp) == ([""], [])


# S4.3 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_s4_3_2d_training_is_1d_training(pool: labkit.WorkerPool, config: str) -> None:
    seen = pool.run(train_beside_1d, pool.device, dp(pool), "fsdp2", config, "float64", timeout_s=60)[0]
    assert len(seen.gaps) == 6
    assert max(seen.gaps) < 1e-12
    assert seen.moved > 0.01
    assert seen.parameters, seen.parameters


def test_s4_3_the_gap_between_2d_and_1d_is_rounding_because_it_shrinks_with_the_precision(pool: labkit.WorkerPool) -> None:
    gaps = {
        dtype: max(pool.run(train_beside_1d, pool.device, dp(pool), "fsdp2", "even", dtype, timeout_s=60)[0].gaps)
        for dtype in ("float32", "float64")
    }
    assert 0 < gaps["float64"] < 1e-6 * gaps["float32"]


# S4.4 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_s4_4_the_sharded_state_of_fsdp2_has_the_plain_keys_and_values(pool: labkit.WorkerPool, config: str) -> None:
    keys, values, layout = pool.run(sharded_state, pool.device, dp(pool), "fsdp2", config).same()
    assert keys == KEYS
    assert values, values
    assert values.num_tensors == len(KEYS)
    kinds = {
        name: "(_StridedShard(dim=0, sf=2), Shard(dim=0))" if name in ROW_CUT else "(Shard(dim=0), Shard(dim=1))"
        for name in ROW_CUT | COLUMN_CUT
    }
    for name, (placements, axes) in layout.items():
        two_axes = (kinds.get(name), "('dp', 'tp')")
        assert (placements, axes) == (two_axes if name in kinds else ("(Shard(dim=0),)", "('dp',)")), name


# S4.5 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["torch.save", "dcp"])
@pytest.mark.parametrize("config", CONFIGS)
def test_s4_5_a_saved_state_comes_back_after_a_step_with_its_shards_mesh_and_placements(
    pool: labkit.WorkerPool, config: str, way: str, tmp_path: Path
) -> None:
    seen = pool.run(save_train_load, pool.device, dp(pool), "fsdp2", config, way, str(tmp_path / "saved"), timeout_s=60)
    for returned in seen.values():
        assert len(returned.moved.differences) == len(KEYS) - 2  # all but the rotary tables
        assert returned.values, returned.values
        assert returned.layout


@on_two
@pytest.mark.parametrize("source", ["dp2 tp1", "dp1 tp2"])
def test_s4_5_two_ranks_load_model_and_moments_on_every_mesh_shape(pool: labkit.WorkerPool, source: str, tmp_path: Path) -> None:
    check_shapes(pool.run(reshape, pool.device, source, str(tmp_path / "saved"), timeout_s=100)[0], 2)


@on_four
@pytest.mark.timeout(300)
@pytest.mark.parametrize("source", [*matrix("dp2 tp2", "dp4 tp1", "dp1 tp4", "replicate2 dp2 tp1"), "replicate2 dp1 tp2"])
def test_s4_5_four_ranks_load_model_and_moments_on_every_mesh_shape(pool: labkit.WorkerPool, source: str, tmp_path: Path) -> None:
    check_shapes(pool.run(reshape, pool.device, source, str(tmp_path / "saved"), timeout_s=200)[0], 5)


def check_shapes(found: dict[str, tuple[object, object]], num: int) -> None:
    assert len(found) == num
    for name, (model, moments) in found.items():
        assert model, f"{name}: {model}"
        assert moments, f"{name}: {moments}"


# S4.6 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("even", {}),
        ("uneven", {}),
        ("even", {"full_state_dict": True}),
        ("uneven", {"full_state_dict": True, "broadcast_from_rank0": True}),
    ],
    ids=["sharded", "sharded_uneven", "full", "full_uneven_broadcast"],
)
def test_s4_6_the_optimizer_state_of_fsdp2_over_tp_is_set_back_exactly(
    pool: labkit.WorkerPool, config: str, options: dict[str, bool]
) -> None:
    moved, back = pool.run(optimizer_round_trip, pool.device, dp(pool), "fsdp2", config, options, timeout_s=60)[0]
    assert len(moved.differences) == moved.num_tensors == 3 * (len(KEYS) - 3)  # step and two moments; tied weights once
    assert back, back


# S4.7 ------------------------------------------------------------------------------------------------------------------


def test_s4_7_input_reshard_on_the_whole_model_gives_wrong_gradients_before_the_cut_activation(pool: labkit.WorkerPool) -> None:
    found = pool.run(reshard_gradients, pool.device, dp(pool), "whole model", 2)[0]
    assert {difference.key for difference in found.differences} == {"net.0.weight", "net.0.bias"}
    assert found.max_abs > 0.1


def test_s4_7_the_one_tensor_that_changes_is_the_plain_output_of_the_column_parallel_layer(pool: labkit.WorkerPool) -> None:
    seen = pool.run(saved_tensors, pool.device, dp(pool))[0]
    assert len(seen) == 6
    assert [(saved.kind, saved.shape) for saved in seen if not saved.comes_back] == [("plain", (4, 4))]


@pytest.mark.parametrize("how", ["off", "whole model, placements kept", "column-parallel layers"])
@pytest.mark.parametrize("fsdp", [0, 2], ids=["tp", "fsdp2_over_tp"])
def test_s4_7_gradients_are_right_where_cut_activations_are_left_alone(pool: labkit.WorkerPool, how: Reshard, fsdp: int) -> None:
    found = pool.run(reshard_gradients, pool.device, dp(pool), how, fsdp)[0]
    assert found, found


def test_s4_7_the_right_ways_keep_fewer_bytes_than_the_wrong_one_and_than_none(pool: labkit.WorkerPool) -> None:
    kept = pool.run(kept_bytes, pool.device, dp(pool))[0]
    right = kept["whole model, placements kept"], kept["column-parallel layers"]
    assert max(right) < kept["off"]
    # The halved copy of the cut activation comes on top: the next layer keeps the whole one.
    assert max(right) < kept["whole model"]


# FSDP1 needs two ranks on each axis --------------------------------------------------------------------------------------


@on_four
@pytest.mark.parametrize("api", FSDP1)
def test_s4_1_fsdp1_on_the_wrong_order_computes_right_and_saves_wrong_weights(
    pool: labkit.WorkerPool, api: Api, tmp_path: Path
) -> None:
    outputs, loaded = pool.run(composition, pool.device, 2, api, INSIDE, str(tmp_path / "saved"), timeout_s=60)[0]
    assert outputs, outputs
    assert {difference.key for difference in loaded.differences} == COLUMN_CUT
    assert loaded.max_abs > 0.01


@on_four
@pytest.mark.parametrize("api", FSDP1)
def test_s4_1_fsdp1_on_the_right_order_saves_right_weights(pool: labkit.WorkerPool, api: Api, tmp_path: Path) -> None:
    outputs, loaded = pool.run(composition, pool.device, 2, api, OUTSIDE, str(tmp_path / "saved"), timeout_s=60)[0]
    assert outputs, outputs
    assert loaded, loaded


@on_two
def test_s4_1_fsdp1_with_orig_params_over_one_dp_rank_and_tp_does_not_run(pool: labkit.WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="Cannot writeback"):
        pool.run(composition, pool.device, 1, "fsdp1_orig", OUTSIDE, str(tmp_path / "saved"), timeout_s=60)


@on_four
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("api", FSDP1)
def test_s4_3_2d_training_with_fsdp1_is_1d_training(pool: labkit.WorkerPool, api: Api, config: str) -> None:
    seen = pool.run(train_beside_1d, pool.device, 2, api, config, "float64", timeout_s=60)[0]
    assert max(seen.gaps) < 1e-12
    assert seen.moved > 0.01
    assert seen.parameters, seen.parameters


@on_four
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("api", FSDP1)
def test_s4_4_every_parameter_of_fsdp1_has_two_placements_on_the_2d_mesh(pool: labkit.WorkerPool, api: Api, config: str) -> None:
    keys, values, layout = pool.run(sharded_state, pool.device, 2, api, config).same()
    # Buffers come first, and the tied weight has one of its two names.
    assert set(keys) == set(KEYS)
    assert values, values
    second = dict.fromkeys(ROW_CUT, "Shard(dim=0)") | dict.fromkeys(COLUMN_CUT, "Shard(dim=1)")
    assert set(layout) == {name for name in KEYS if not name.startswith("rope")}
    for name, (placements, axes) in layout.items():
        assert (placements, axes) == (f"(Shard(dim=0), {second.get(name, 'Replicate()')})", "('dp', 'tp')"), name


@on_four
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("way", ["torch.save", "dcp"])
def test_s4_5_a_state_of_fsdp1_comes_back_after_a_step(pool: labkit.WorkerPool, way: str, config: str, tmp_path: Path) -> None:
    seen = pool.run(save_train_load, pool.device, 2, "fsdp1_orig", config, way, str(tmp_path / "saved"), timeout_s=60)
    for returned in seen.values():
        assert len(returned.moved.differences) == len(KEYS) - 2
        assert returned.values, returned.values
        assert returned.layout


@on_four
def test_s4_6_fsdp1_sets_wrong_moments_of_every_split_weight_in_silence(pool: labkit.WorkerPool) -> None:
    moved, back = pool.run(optimizer_round_trip, pool.device, 2, "fsdp1_orig", "even", {}, timeout_s=60)[0]
    assert len(moved.differences) == moved.num_tensors
    wrong = {difference.key.split("/")[0] for difference in back.differences}
    assert COLUMN_CUT <= wrong <= COLUMN_CUT | ROW_CUT
    assert back.max_abs > 1e-4


@on_four
def test_s4_6_fsdp1_gives_the_second_tp_half_the_moments_of_the_first(pool: labkit.WorkerPool) -> None:
    assert pool.run(first_half_twice, pool.device, 2, timeout_s=60)[0] == (True, False)


@on_four
def test_s4_6_labkit_refuses_to_set_it_and_what_fsdp1_read_loads_under_fsdp2(pool: labkit.WorkerPool) -> None:
    text, loaded = pool.run(refused_restore, pool.device, 2, timeout_s=60)[0]
    assert "1 FSDP1 unit of this model holds tensor-parallel" in text
    assert "load it into the same model under fully_shard" in text
    assert loaded, loaded


@on_four
def test_s4_6_a_full_state_of_uneven_shards_needs_the_broadcast(pool: labkit.WorkerPool) -> None:
    with pytest.raises(RankFailedError, match="AssertionError"):
        pool.run(optimizer_round_trip, pool.device, 2, "fsdp2", "uneven", {"full_state_dict": True}, timeout_s=60)


@on_four
@pytest.mark.parametrize("how", ["off", "whole model, placements kept", "column-parallel layers"])
def test_s4_7_gradients_are_right_under_fsdp1_too(pool: labkit.WorkerPool, how: Reshard) -> None:
    found = pool.run(reshard_gradients, pool.device, 2, how, 1)[0]
    assert found, found


@on_four
def test_s4_7_input_reshard_as_in_the_seed_is_wrong_under_fsdp1(pool: labkit.WorkerPool) -> None:
    found = pool.run(reshard_gradients, pool.device, 2, "whole model", 1)[0]
    assert {difference.key for difference in found.differences} == {"net.0.weight", "net.0.bias"}


def test_s4_7_torch_still_has_the_private_functions_that_the_trace_uses() -> None:
    private = importlib.import_module("torch.distributed.tensor.parallel.input_reshard")
    assert {"_pack_hook_tp", "_unpack_hook_tp"} <= vars(private).keys()
