"""Claims of notebook 05 about torch. If a new torch fails one of these tests, the sentence in the notebook is wrong too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import labkit
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block, ModelConfig
from labkit.spmd.shards.meshes import make_mesh, shard_2d
from labkit.spmd.shards.parity import compare
from labkit.spmd.shards.tensor_parallel import tensor_parallel_plan
from tests.matrix import matrix


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


on_four = pytest.mark.parametrize("pool", [4], indirect=True)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Kinds of placements ---------------------------------------------------------------------------------------------------


def what_a_strided_shard_is() -> tuple[bool, bool, bool]:
    model = shard_2d(build_model(ModelConfig(num_layers=1)), make_mesh("cpu"), tensor_parallel_plan(), blocks=Block)
    placement = model.get_parameter("layers.0.feed_forward.w1.weight").placements[0]
    assert str(placement) == "_S(0, 2)"
    return isinstance(placement, Shard), placement.is_shard(), placement.is_replicate()


def test_a_strided_shard_is_no_shard_says_no_to_is_shard_and_is_no_copy(pool: labkit.WorkerPool) -> None:
    assert pool.run(what_a_strided_shard_is).same() == (False, False, False)


# A full state ----------------------------------------------------------------------------------------------------------

EVEN = ModelConfig(num_layers=1)
UNEVEN = ModelConfig(vocab_size=251, dim=20, num_layers=1, num_heads=2, hidden_dim=54)


def full_load(config: ModelConfig, broadcast: bool, on_rank_0_only: bool) -> str:
    mesh, plan = make_mesh("cpu"), tensor_parallel_plan()
    source, target = (shard_2d(build_model(config, seed=seed), mesh, plan, blocks=Block) for seed in (0, 1))
    full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    assert not compare(target, source)
    given = full if dist.get_rank() == 0 or not on_rank_0_only else {}
    try:
        set_model_state_dict(target, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast))
    except AssertionError as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        assert frame is not None
        return f"{frame.tb_frame.f_code.co_name}: {str(error)!r}"
    return "equal" if compare(target, source) else "wrong"


@on_four
def test_a_full_state_of_an_uneven_model_is_refused_without_a_text_and_a_broadcast_one_is_right(pool: labkit.WorkerPool) -> None:
    assert pool.run(full_load, UNEVEN, False, False, timeout_s=60).same() == "_shard_tensor: ''"
    assert pool.run(full_load, UNEVEN, True, False, timeout_s=60).same() == "equal"


@on_four
def test_a_full_state_of_an_even_model_is_right_both_ways(pool: labkit.WorkerPool) -> None:
    assert pool.run(full_load, EVEN, False, False, timeout_s=60).same() == "equal"
    assert pool.run(full_load, EVEN, True, False, timeout_s=60).same() == "equal"


@on_four
def test_with_a_broadcast_only_rank_0_needs_the_full_state(pool: labkit.WorkerPool) -> None:
    assert pool.run(full_load, UNEVEN, True, True, timeout_s=60).same() == "equal"


def shard_sizes() -> tuple[list[int], list[int]]:
    """Return the number of rows that the scatter over dp would give to each place, of 54 rows and of 56."""
    model = shard_2d(build_model(UNEVEN), make_mesh("cpu"), tensor_parallel_plan(), blocks=Block)
    strided: Any = model.get_parameter("layers.0.feed_forward.w1.weight").placements[0]
    pieces = [strided._split_tensor(torch.zeros(rows, 1), 2, with_padding=True)[0] for rows in (54, 56)]
    return [len(piece) for piece in pieces[0]], [len(piece) for piece in pieces[1]]


@on_four
def test_the_assertion_is_about_pieces_of_one_size(pool: labkit.WorkerPool) -> None:
    assert pool.run(shard_sizes).same() == ([28, 26], [28, 28])


def full_sizes(cpu_offload: bool) -> int:
    model = shard_2d(build_model(EVEN), make_mesh("cpu"), tensor_parallel_plan(), blocks=Block)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload))
    return sum(tensor.numel() for tensor in full.values() if isinstance(tensor, Tensor))


def test_a_full_state_is_whole_on_every_rank_and_with_cpu_offload_on_rank_0_alone(pool: labkit.WorkerPool) -> None:
    num_elements = sum(tensor.numel() for tensor in build_model(EVEN).state_dict().values())
    assert pool.run(full_sizes, False).same() == num_elements
    assert list(pool.run(full_sizes, True).values()) == [num_elements] + [0] * (pool.world_size - 1)


# Clipping over several meshes ------------------------------------------------------------------------------------------


def clipped(way: str) -> tuple[str, float, float, float]:
    """Return torch's error, the norm before and after, and the distance of the gradients from the scaled ones."""
    model = shard_2d(build_model(EVEN, seed=0), make_mesh("cpu"), tensor_parallel_plan(), blocks=Block)
    model(torch.arange(16).view(1, 16)).square().mean().backward()
    parameters = list(model.parameters())
    before = [whole(parameter.grad).clone() for parameter in parameters]
    norm = nn.utils.get_total_norm(before)
    limit = float(norm) / 4
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    said = ""
    try:
        if way == "at once":
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        for group in by_mesh.values() if way == "per mesh" else ():
            nn.utils.clip_grads_with_norm_(group, limit, norm)
    except RuntimeError as error:
        said = str(error)
    after = [whole(parameter.grad) for parameter in parameters]
    gap = max(float((got - one / 4).abs().max()) for got, one in zip(after, before, strict=True))
    return said, limit, float(nn.utils.get_total_norm(after)), gap


def test_gradients_on_two_meshes_are_clipped_mesh_by_mesh_with_the_common_norm(pool: labkit.WorkerPool) -> None:
    said, _, _, _ = pool.run(clipped, "at once").same()
    assert "different mesh" in said  # torch 2.11 says it in the singular
    for said, limit, norm, gap in pool.run(clipped, "per mesh").values():
        assert not said
        assert norm == pytest.approx(limit, rel=1e-4)  # torch divides by the norm plus 1e-6
        assert gap < 1e-6
