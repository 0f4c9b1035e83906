"""What the text of notebook 05 says of torch. Where a new torch fails one of these, the sentence in the notebook is wrong too."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import labkit
from labkit.errors import RankFailedError
from labkit.spmd.initialize import build_model
from labkit.spmd.meshes import make_mesh, shard_2d
from labkit.spmd.model import Block, ModelConfig
from labkit.spmd.parity import compare
from labkit.spmd.tensor_parallel import PlanError, check_plan, tensor_parallel_plan

KEPT = ColwiseParallel(use_local_output=False)


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


on_four = pytest.mark.parametrize("pool", [4], indirect=True)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def quiet() -> None:
    """Leave out the traceback that torch logs of a product of shapes that do not fit."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def two_axes(num_tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // num_tp, num_tp), mesh_dim_names=("dp", "tp"))


# A size that TP cannot share evenly ------------------------------------------------------------------------------------


def pair(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))


def uneven_under(plan: Mapping[str, ParallelStyle], width: int, num_tp: int) -> tuple[str, float, float, bool]:
    """torch's error, the gaps of output and gradients against one rank, and whether `check_plan` passes the plan."""
    quiet()
    mesh, reference = two_axes(num_tp), pair(width)
    model = copy.deepcopy(reference)
    try:
        check_plan(model, plan, num_tp)
        passed = True
    except PlanError:
        passed = False
    parallelize_module(model, mesh["tp"], dict(plan))
    fully_shard(model, mesh=mesh["dp"])
    x = torch.rand(8, 64, generator=torch.Generator().manual_seed(1))
    try:
        output = model(x)
    except RuntimeError as error:
        return str(error), float("nan"), float("nan"), passed
    expected = reference(x)
    output.square().mean().backward()
    expected.square().mean().backward()
    gaps = [
        float((whole(got.grad) - whole(right.grad)).abs().max())
        for got, right in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    return "", float((output - expected).abs().max()), max(gaps), passed


PLAIN: dict[str, dict[str, ParallelStyle]] = {
    "a pair": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "column-parallel alone": {"0": ColwiseParallel()},
    "row-parallel alone": {"2": RowwiseParallel()},
}
PLACED: dict[str, dict[str, ParallelStyle]] = {
    "a pair that keeps placements": {"0": KEPT, "2": RowwiseParallel()},
    "whole outputs": {"0": ColwiseParallel(output_layouts=Replicate())},
    "whole inputs": {"2": RowwiseParallel(input_layouts=Replicate())},
}


@pytest.mark.parametrize("width", [191, 5, 3])
@pytest.mark.parametrize("plan", PLAIN.values(), ids=PLAIN)
def test_an_uneven_size_with_plain_outputs_fails_in_the_first_forward_and_check_plan_says_so(
    pool: labkit.WorkerPool, plan: dict[str, ParallelStyle], width: int
) -> None:
    for num_tp in {2, pool.world_size}:
        for error, _, _, passed in pool.run(uneven_under, plan, width, num_tp, timeout_s=60).values():
            assert "must have same reduction dim" in error or "shapes cannot be multiplied" in error
            assert not passed


@pytest.mark.parametrize("width", [191, 7])
@pytest.mark.parametrize("plan", PLACED.values(), ids=PLACED)
def test_an_uneven_size_is_right_where_its_placements_are_kept_and_check_plan_lets_it_pass(
    pool: labkit.WorkerPool, plan: dict[str, ParallelStyle], width: int
) -> None:
    for num_tp in {2, pool.world_size}:
        for error, output, gradient, passed in pool.run(uneven_under, plan, width, num_tp, timeout_s=60).values():
            assert not error
            assert output < 1e-6
            assert gradient < 1e-7
            assert passed


@on_four
@pytest.mark.parametrize("width", [3, 5])
def test_a_tp_rank_that_gets_no_row_fails_in_the_backward_of_fsdp(pool: labkit.WorkerPool, width: int) -> None:
    with pytest.raises(RankFailedError, match="_chunk_cat expects non-empty tensor"):
        pool.run(uneven_under, PLACED["whole outputs"], width, 4, timeout_s=60)


def uneven_embedding(style: ParallelStyle, shape: tuple[int, int]) -> tuple[float, bool]:
    mesh = two_axes(2)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(*shape))
    model = copy.deepcopy(reference)
    check_plan(model, {"0": style}, 2)
    parallelize_module(model, mesh["tp"], {"0": style})
    fully_shard(model, mesh=mesh["dp"])
    tokens = torch.arange(shape[0]).view(1, -1)
    return float((whole(model(tokens)) - reference(tokens)).abs().max()), whole(model[0].weight).equal(reference[0].weight)


@pytest.mark.parametrize(
    ("style", "shape"),
    [(RowwiseParallel(input_layouts=Replicate()), (251, 20)), (ColwiseParallel(output_layouts=Replicate()), (250, 21))],
    ids=["by_rows", "by_columns"],
)
def test_an_uneven_embedding_is_right_where_check_plan_lets_it_pass(
    pool: labkit.WorkerPool, style: ParallelStyle, shape: tuple[int, int]
) -> None:
    assert pool.run(uneven_embedding, style, shape).same() == (0.0, True)


def uneven_model(folder: str) -> tuple[float, dict[str, str], bool, bool]:
    """The course's model with 191 hidden features, 2D, whose feed-forward keeps placements."""
    config = ModelConfig(num_layers=1, hidden_dim=191)
    plan = tensor_parallel_plan() | {f"layers.*.feed_forward.{name}": KEPT for name in ("w1", "w3")}
    mesh = make_mesh("cpu")
    reference = build_model(config, seed=0)
    model = shard_2d(build_model(config, seed=0), mesh, plan, blocks=Block)
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        gap = float((model(tokens) - reference(tokens)).abs().max())
    placed = {name: str(tuple(model.get_parameter(f"layers.0.feed_forward.{name}.weight").placements)) for name in ("w1", "w2")}
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    loaded = shard_2d(build_model(config, seed=1), mesh, plan, blocks=Block)
    state = {"model": get_model_state_dict(loaded)}
    differed = not compare(loaded, reference)
    dcp.load(state, checkpoint_id=folder)
    return gap, placed, differed, bool(compare(loaded, reference))


def test_the_model_of_the_course_trains_and_saves_with_an_uneven_size(pool: labkit.WorkerPool, tmp_path: Path) -> None:
    gap, placed, differed, equal = pool.run(uneven_model, str(tmp_path / "saved"), timeout_s=60).same()
    assert gap < 1e-5
    assert placed["w1"] == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    assert differed
    assert equal


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
    """How many rows the scatter over dp would give to each place, of 54 rows and of 56."""
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
    """torch's error, the norm before and after, and how far the gradients are from the scaled ones."""
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
    assert "different meshes" in said
    for said, limit, norm, gap in pool.run(clipped, "per mesh").values():
        assert not said
        assert norm == pytest.approx(limit, rel=1e-4)  # torch divides by the norm plus 1e-6
        assert gap < 1e-6
