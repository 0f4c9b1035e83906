from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import labkit
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block, ModelConfig
from labkit.spmd.shards.records import Chunk, ShardRecord
from labkit.spmd.shards.sharding import shard_model
from labkit.spmd.shards.tables import shard_table
from tests.matrix import matrix

SMALL = ModelConfig(dim=16, num_layers=1, num_heads=4, hidden_dim=24, max_seq_len=32)


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def numbered(*shape: int) -> Tensor:
    """Return a tensor whose elements are their own positions, so a shard's values show its place."""
    return torch.arange(prod(shape), dtype=torch.float32).view(shape)


def check_against_values(tensor: DTensor, record: ShardRecord) -> None:
    """Require that a record's chunks name exactly the elements of the local tensor, in its order."""
    everything = numbered(*tensor.shape)
    boxes = [
        everything[tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))].flatten()
        for chunk in record.chunks
    ]
    assert torch.equal(tensor.to_local().flatten(), torch.cat(boxes) if boxes else everything.flatten()[:0])
    assert record.local_bytes == 4 * sum(chunk.numel for chunk in record.chunks)


def rows_of(num_rows: int) -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(numbered(num_rows, 3), mesh, [Shard(0)])
    (record,) = shard_table({"w": tensor})
    check_against_values(tensor, record)
    return [(chunk.offsets[0], chunk.sizes[0]) for chunk in record.chunks]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 10])
def test_uneven_rows_are_where_the_values_are(pool: labkit.WorkerPool, num_rows: int) -> None:
    held = pool.run(rows_of, num_rows)
    rows = [row for spans in held.values() for first, size in spans for row in range(first, first + size)]
    assert rows == list(range(num_rows))
    if num_rows == 10 and pool.world_size == 4:
        assert [span[0][1] for span in held.values()] == [3, 3, 3, 1]


def two_axes(num_rows: int) -> dict[str, ShardRecord]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    placements = {
        "rows twice": (Shard(0), Shard(0)),
        "rows and columns": (Shard(0), Shard(1)),
        "replicated": (Replicate(), Replicate()),
        "rows of a copy": (Replicate(), Shard(0)),
    }
    tensors = {name: distribute_tensor(numbered(num_rows, 4), mesh, places) for name, places in placements.items()}
    records = shard_table(tensors)
    for record in records:
        check_against_values(tensors[record.name], record)
    return {record.name: record for record in records}


@pytest.mark.parametrize("num_rows", [8, 6, 5])
def test_two_axes_are_where_the_values_are(pool: labkit.WorkerPool, num_rows: int) -> None:
    records = pool.run(two_axes, num_rows)
    assert records[0]["rows and columns"].placements == ("Shard(dim=0)", "Shard(dim=1)")
    assert records[0]["rows and columns"].mesh_axes == ("dp", "tp")
    assert [records[rank]["replicated"].chunks for rank in records] == [(Chunk((0, 0), (num_rows, 4)),)] * pool.world_size
    coordinates = [records[rank]["replicated"].coordinate for rank in records]
    assert coordinates == [(rank // (pool.world_size // 2), rank % (pool.world_size // 2)) for rank in records]


def strided(hidden: int) -> ShardRecord:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, hidden, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(numbered(hidden, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    (record,) = shard_table(model)
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    check_against_values(weight, record)
    return record


@pytest.mark.parametrize("hidden", [8, 7, 3])
def test_strided_shards_of_fsdp_over_tensor_parallelism_are_where_the_values_are(pool: labkit.WorkerPool, hidden: int) -> None:
    records = pool.run(strided, hidden)
    # With one rank per group of tensor parallelism nothing is split twice, and torch writes plain shards.
    first = "_StridedShard(dim=0, sf=2)" if pool.world_size == 4 else "Shard(dim=0)"
    assert records[0].placements == (first, "Shard(dim=0)")
    rows = sorted(row for record in records.values() for chunk in record.chunks for row in _rows(chunk))
    assert rows == list(range(hidden))
    if hidden == 8 and pool.world_size == 4:
        assert [record.chunks[0].offsets[0] for record in records.values()] == [0, 4, 2, 6]


def _rows(chunk: Chunk) -> range:
    return range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])


def whole_model() -> list[ShardRecord]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = build_model(SMALL)
    plan = {"attention.wq": ColwiseParallel(), "attention.wo": RowwiseParallel()}
    for block in model.layers:
        parallelize_module(block, mesh["tp"], plan)
    shard_model(model, mesh["dp"], blocks=Block)
    return shard_table(model)


def test_a_model_s_table_lists_parameters_ties_and_buffers(pool: labkit.WorkerPool) -> None:
    tables = pool.run(whole_model)
    by_name = {record.name: record for record in tables[0]}
    assert by_name.keys() == build_model(SMALL).state_dict().keys()
    assert by_name["head.weight"].tied_to == "embed.weight"
    assert by_name["embed.weight"].tied_to is None
    assert not by_name["rope_cos"].is_distributed
    assert by_name["layers.0.attention.wo.weight"].placements == ("Shard(dim=0)", "Shard(dim=1)")


def optimizer_table() -> list[ShardRecord]:
    model = shard_model(build_model(SMALL), init_device_mesh("cpu", (dist.get_world_size(),)), blocks=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    return shard_table(get_optimizer_state_dict(model, optimizer))


def test_moments_lie_where_their_parameters_lie(pool: labkit.WorkerPool) -> None:
    records = {record.name: record for record in pool.run(optimizer_table)[1]}
    moment = records["state/layers.0.attention.wq.weight/exp_avg"]
    assert (moment.placements, moment.chunks[0].sizes) == (("Shard(dim=0)",), (16 // pool.world_size, 16))
    assert not records["state/layers.0.attention.wq.weight/step"].is_distributed


def partial_and_outside() -> tuple[ShardRecord, ShardRecord]:
    world = init_device_mesh("cpu", (dist.get_world_size(),))
    unreduced = DTensor.from_local(torch.ones(2, 3), world, [Partial()])
    first_only = DTensor.from_local(torch.ones(2, 3), torch.distributed.device_mesh.DeviceMesh("cpu", [0]), [Shard(0)])
    partial, outside = shard_table({"partial": unreduced, "outside": first_only})
    return partial, outside


def test_partial_sums_and_ranks_outside_the_mesh_are_told_as_they_are(pool: labkit.WorkerPool) -> None:
    records = pool.run(partial_and_outside)
    assert [partial.placements for partial, _ in records.values()] == [("Partial(sum)",)] * pool.world_size
    assert records[0][1].chunks == (Chunk((0, 0), (2, 3)),)
    assert (records[1][1].coordinate, records[1][1].chunks) == (None, ())


def test_records_need_no_torch_to_be_read(pool: labkit.WorkerPool) -> None:
    # This process has torch already, so look at where every part of a record comes from.
    record = pool.run(whole_model)[0][0]
    kinds = {type(value) for value in (record, *vars(record).values(), *record.chunks, *record.chunks[0].offsets)}
    assert all(not kind.__module__.startswith("torch") for kind in kinds)
    assert "torch" not in sys.modules["labkit.spmd.shards.records"].__dict__
