from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import labkit
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block, ModelConfig
from labkit.spmd.shards.parity import compare
from labkit.spmd.shards.records import Parity
from labkit.spmd.shards.sharding import shard_model
from tests.matrix import matrix

SMALL = ModelConfig(dim=16, num_layers=1, num_heads=4, hidden_dim=24, max_seq_len=32)


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded_against_plain() -> tuple[Parity, Parity]:
    model = shard_model(build_model(SMALL), world_mesh(), blocks=Block)
    whole = build_model(SMALL)
    return compare(model, whole), compare(whole, model)


def test_a_sharded_model_equals_the_plain_one_in_both_directions(pool: labkit.WorkerPool) -> None:
    left, right = pool.run(sharded_against_plain).same()
    assert left
    assert right
    assert left.num_elements == sum(tensor.numel() for tensor in build_model(SMALL).state_dict().values())


def one_element_off_in_the_last_shard() -> Parity:
    model = shard_model(build_model(SMALL), world_mesh(), blocks=Block)
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            model.layers[0].feed_forward.w2.weight.to_local()[-1, -1] += 1.0
    return compare(model, build_model(SMALL))


def test_every_rank_sees_the_one_element_that_differs_on_one_rank(pool: labkit.WorkerPool) -> None:
    (difference,) = pool.run(one_element_off_in_the_last_shard).same().differences
    assert difference.key == "layers.0.feed_forward.w2.weight"
    assert "1 of 384 elements differ, first at (15, 23)" in difference.detail
    assert difference.max_abs == pytest.approx(1.0)


def plain_copies_differ_on_rank_one() -> Parity:
    """Ranks disagree about the first key: a comparison that stopped there would leave rank 0 in the next gather."""
    mine = {"first": torch.full((2,), float(dist.get_rank())), "second": distribute_tensor(torch.ones(8), world_mesh(), [Shard(0)])}
    return compare(mine, {"first": torch.zeros(2), "second": torch.ones(8)})


def test_ranks_that_disagree_all_finish(pool: labkit.WorkerPool) -> None:
    results = pool.run(plain_copies_differ_on_rank_one, timeout_s=60)
    assert [bool(result) for result in results.values()] == [True] + [False] * (pool.world_size - 1)


def keys_missing_on_one_side() -> Parity:
    tensors = {name: distribute_tensor(torch.ones(5), world_mesh(), [Shard(0)]) for name in "abc"}
    other = {name: tensor for name, tensor in tensors.items() if name != "b"}
    return compare(other, tensors)


def test_a_missing_sharded_key_is_reported_and_hangs_nobody(pool: labkit.WorkerPool) -> None:
    result = pool.run(keys_missing_on_one_side, timeout_s=60).same()
    assert [(difference.key, difference.kind) for difference in result.differences] == [("b", "missing")]


def other_placements() -> Parity:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    full = torch.arange(30.0).view(5, 6)
    return compare(
        {"w": distribute_tensor(full, mesh, [Shard(0), Shard(1)])}, {"w": distribute_tensor(full, mesh, [Replicate(), Shard(0)])}
    )


def test_the_same_tensor_sharded_otherwise_is_equal(pool: labkit.WorkerPool) -> None:
    assert pool.run(other_placements).same()


def comparing_changes_nothing() -> bool:
    model = shard_model(build_model(SMALL), world_mesh(), blocks=Block)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    compare(model, nn.Module())
    return all(torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters(), strict=True))


def test_a_comparison_leaves_the_model_as_it_was(pool: labkit.WorkerPool) -> None:
    assert pool.run(comparing_changes_nothing).same()
