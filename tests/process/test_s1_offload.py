"""Seed rows S1.1 to S1.3: recomputation and offload change only memory, in every order, and move the right tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import labkit
from labkit.errors import RankFailedError
from tests.matrix import matrix
from tests.process.s1_scenarios import (
    INPUT_BYTES,
    LAYER_BYTES,
    NUM_LAYERS,
    ROWS,
    SIZES,
    WEIGHT_BYTES,
    Run,
    nested_gradients,
    run,
)

ENGINES = ("fsdp1", "fsdp1 original parameters", "fsdp2")
KINDS = ("checkpoint", "reentrant", "offload_wrapper", "labkit")
BY_LAYER = ("wrap(chain(shard(layer)))", "chain(shard(wrap(layer)))", "chain(wrap(shard(layer)))")
WHOLE = ("wrap(shard(chain))", "shard(wrap(chain))")
HIDDEN_BYTES = ROWS * SIZES.hidden_dim * 4
#: The bytes that save_on_cpu moves of a layer: the input once per product, each hidden tensor once per save, and the weights.
NAIVE_BYTES = 2 * INPUT_BYTES + 4 * HIDDEN_BYTES + WEIGHT_BYTES


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def check_same_training(left: Run, right: Run) -> None:
    assert left.losses == right.losses
    for ours, theirs in zip(left.outputs, right.outputs, strict=True):
        assert torch.equal(ours, theirs)
    assert sum(gradient.numel() for gradient in right.gradients[-1]) > 0
    for ours_of_step, theirs_of_step in zip(left.gradients, right.gradients, strict=True):
        for ours, theirs in zip(ours_of_step, theirs_of_step, strict=True):
            assert torch.equal(ours, theirs)


# FSDP1 cannot offload parameters on a CPU, where torch fails or trains wrongly; tests/gpu has these rows.
@pytest.mark.parametrize(("engine", "offload_params"), [*((engine, False) for engine in ENGINES), ("fsdp2", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_s1_1_every_nesting_trains_like_the_baseline(pool: labkit.WorkerPool, engine: str, kind: str, offload_params: bool) -> None:
    options = {"offload_params": offload_params, "timeout_s": 60.0}
    baseline = pool.run(run, BY_LAYER[1], engine, "nothing", "cpu", **options)
    for nesting in BY_LAYER:
        other = pool.run(run, nesting, engine, kind, "cpu", **options)
        for rank in range(pool.world_size):
            check_same_training(other[rank], baseline[rank])


@pytest.mark.parametrize("engine", ENGINES)
def test_s1_1_activations_move_exactly_where_asked_counted_in_bytes(pool: labkit.WorkerPool, engine: str) -> None:
    for nesting, num_entered in zip(BY_LAYER, (1, NUM_LAYERS, NUM_LAYERS), strict=True):
        for found in pool.run(run, nesting, engine, "offload_wrapper", "cpu", timeout_s=60).values():
            assert found.save_on_cpu == (num_entered, NUM_LAYERS * NAIVE_BYTES)
        for found in pool.run(run, nesting, engine, "labkit", "cpu", steps=1, timeout_s=60).values():
            assert found.save_on_cpu == (0, 0)
            assert found.offload is not None
            assert found.offload.moved_bytes == NUM_LAYERS * LAYER_BYTES
            assert found.offload.weight_bytes == NUM_LAYERS * WEIGHT_BYTES
            assert found.offload.repeated_bytes == NUM_LAYERS * INPUT_BYTES
        for kind in ("nothing", "checkpoint"):
            assert {found.save_on_cpu for found in pool.run(run, nesting, engine, kind, "cpu", timeout_s=60).values()} == {(0, 0)}


@pytest.mark.parametrize("by_hand", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["checkpoint", "reentrant", "offload_wrapper"])
@pytest.mark.parametrize("engine", ENGINES)
def test_s1_2_four_nestings_agree_for_six_iterations(pool: labkit.WorkerPool, engine: str, kind: str, by_hand: str) -> None:
    baseline = pool.run(run, WHOLE[0], engine, "nothing", "cpu", steps=6, timeout_s=60)
    nestings = [pool.run(run, nesting, engine, kind, "cpu", steps=6, timeout_s=60) for nesting in WHOLE]
    called = pool.run(run, WHOLE[0], engine, kind, "cpu", steps=6, by_hand=by_hand, timeout_s=60)
    offloads = kind == "offload_wrapper"
    for rank in range(pool.world_size):
        for other in (*(nesting[rank] for nesting in nestings), called[rank]):
            check_same_training(other, baseline[rank])
        assert baseline[rank].forwards == [6] * NUM_LAYERS
        assert called[rank].forwards == [12] * NUM_LAYERS
        assert {nesting[rank].forwards[0] for nesting in nestings} == {6 if offloads else 12}
        # Around a checkpoint only its input moves.
        assert called[rank].save_on_cpu == ((1, INPUT_BYTES) if offloads else (0, 0))


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("engine", ["fsdp1 not sharded", "ddp", "replicate", "fsdp2"])
def test_s1_3_recomputed_submodules_of_wrapped_modules_have_the_same_names_and_gradients(
    pool: labkit.WorkerPool, engine: str, reentrant: bool
) -> None:
    plain = pool.run(nested_gradients, engine, "cpu", False, reentrant, timeout_s=60)
    recomputed = pool.run(nested_gradients, engine, "cpu", True, reentrant, timeout_s=60)
    for rank in range(pool.world_size):
        assert len(plain[rank]) == 44
        assert list(plain[rank]) == list(recomputed[rank])
        for name, gradient in plain[rank].items():
            assert torch.equal(gradient, recomputed[rank][name]), name


def test_s1_3_reentrant_submodules_inside_one_sharded_unit_of_fsdp1_crash(pool: labkit.WorkerPool) -> None:
    with pytest.raises(RankFailedError, match="mat2 must be a matrix"):
        pool.run(nested_gradients, "fsdp1 sharded", "cpu", True, True, timeout_s=60)
    recomputed = pool.run(nested_gradients, "fsdp1 sharded", "cpu", True, False, timeout_s=60)
    plain = pool.run(nested_gradients, "fsdp1 sharded", "cpu", False, False, timeout_s=60)
    for rank in range(pool.world_size):
        assert list(plain[rank]) == list(recomputed[rank])
        assert all(torch.equal(gradient, recomputed[rank][name]) for name, gradient in plain[rank].items())
