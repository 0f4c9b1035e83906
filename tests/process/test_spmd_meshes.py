"""Meshes and 2D models on real ranks: some are made, some are refused, and a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard

import labkit
from labkit.errors import LabkitError
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block, ModelConfig
from labkit.spmd.shards.layouts import MeshRecord
from labkit.spmd.shards.meshes import check_mesh, make_mesh, mesh_record, restore_optimizer, shard_2d
from labkit.spmd.shards.tensor_parallel import tensor_parallel_plan
from labkit.spmd.trace.reshard_trace import trace_input_reshard
from tests.matrix import matrix

SMALL = ModelConfig(vocab_size=64, dim=16, num_layers=1, num_heads=2, hidden_dim=24, max_seq_len=16)


@pytest.fixture(scope="module", params=matrix(4, 1, 2, 3))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def error_of(build: Any, *arguments: Any, **named: Any) -> str:
    try:
        build(*arguments, **named)
    except LabkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def default_mesh() -> MeshRecord:
    return mesh_record(make_mesh("cpu"))


def test_the_default_mesh_has_two_tp_ranks_where_that_divides(pool: labkit.WorkerPool) -> None:
    expected = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2)}[pool.world_size]
    for record in pool.run(default_mesh).values():
        assert record == MeshRecord(("dp", "tp"), expected, tuple(range(pool.world_size)))


def impossible_meshes() -> list[str]:
    return [error_of(make_mesh, "cpu", tp=tp) for tp in (0, dist.get_world_size() + 1)]


def test_a_tp_size_that_does_not_divide_is_refused_with_the_sizes_that_do(pool: labkit.WorkerPool) -> None:
    zero, larger = pool.run(impossible_meshes).same()
    assert zero.startswith("MeshError:")
    assert f"Sizes that divide {pool.world_size}: 1" in larger


def meshes_without_the_axes() -> list[str]:
    world_size = dist.get_world_size()
    nameless = init_device_mesh("cpu", (1, world_size))
    others = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    said = [error_of(check_mesh, mesh, fsdp=2) for mesh in (nameless, others, make_mesh("cpu")["dp"])]
    return [*said, error_of(check_mesh, others, fsdp=1, dp="replicate", tp="shard")]


def test_a_mesh_without_the_two_axes_is_refused_and_other_names_can_be_given(pool: labkit.WorkerPool) -> None:
    nameless, others, one_axis, renamed = pool.run(meshes_without_the_axes).same()
    assert "this one has no named axes" in nameless
    assert "this one has axes replicate, shard" in others
    assert "this one has axes dp" in one_axis
    assert renamed == ""


def bad_plan() -> tuple[str, bool]:
    model = build_model(SMALL)
    plan = {**tensor_parallel_plan(), "layers.*.attention.w0": RowwiseParallel()}
    said = error_of(shard_2d, model, make_mesh("cpu"), plan, blocks=Block)
    return said, not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_a_bad_plan_is_refused_before_the_model_is_touched(pool: labkit.WorkerPool) -> None:
    said, untouched = pool.run(bad_plan).same()
    assert said.startswith("ParallelPlanError:")
    assert "layers.*.attention.w0: no module has this name" in said
    assert untouched


def replicated() -> dict[str, str]:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world_size // 4, 2), mesh_dim_names=("replicate", "dp", "tp"))
    model = shard_2d(build_model(SMALL), mesh, tensor_parallel_plan(), blocks=Block)
    names = ("layers.0.feed_forward.w2.weight", "norm.weight")
    return {name: str(getattr(model.get_parameter(name), "placements", "")) for name in names}


@pytest.mark.parametrize("pool", [4], indirect=True)
def test_a_replicate_axis_goes_to_fsdp(pool: labkit.WorkerPool) -> None:
    assert pool.run(replicated).same() == {
        "layers.0.feed_forward.w2.weight": "(Replicate(), Shard(dim=0), Shard(dim=1))",
        "norm.weight": "(Replicate(), Shard(dim=0))",
    }


def plain_restore() -> bool:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    restore_optimizer(model, optimizer, get_optimizer_state_dict(model, optimizer))
    return True


def test_a_plain_model_s_optimizer_can_be_restored(pool: labkit.WorkerPool) -> None:
    assert pool.run(plain_restore).same()


def gradients_with_and_without_the_trace() -> bool:
    """The trace packs and unpacks like `input_reshard`, with the same wrong gradients."""
    tp = make_mesh("cpu")["tp"]
    found = []
    for traced in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        parallelize_module(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = torch.rand(4, 8)
        if traced:
            with trace_input_reshard(model, tp, modules=[model]):
                model(x).square().sum().backward()
        else:
            input_reshard(model, tp, 0)
            model(x).square().sum().backward()
        found.append([parameter.grad.full_tensor() for parameter in model.parameters()])  # type: ignore[union-attr]
    same = [torch.equal(left, right) for left, right in zip(*found, strict=True)]
    return all(same)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_the_trace_gives_the_gradients_of_input_reshard(pool: labkit.WorkerPool) -> None:
    assert pool.run(gradients_with_and_without_the_trace).same()


def after_an_error() -> tuple[bool, int, bool]:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(RuntimeError), trace_input_reshard(model, make_mesh("cpu")["tp"], modules=[model]) as trace:
        model(torch.rand(4, 3))
    before = len(trace.saved)
    x = torch.rand(4, 8, requires_grad=True)
    x.square().sum().backward()
    return not model._forward_hooks and not model._forward_pre_hooks, len(trace.saved) - before, torch.equal(x.grad, 2 * x)


def test_the_trace_leaves_nothing_behind_when_the_forward_fails(pool: labkit.WorkerPool) -> None:
    assert pool.run(after_an_error).same() == (True, 0, True)
