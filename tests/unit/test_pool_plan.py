"""The devices of a pool: what is chosen for how many ranks and GPUs, and how the pool says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.controller.start.pool_plan import MOST_ON_A_GPU, PoolPlan, attached_plan, make_plan
from labkit.errors import InvalidPoolError
from labkit.wire.messages import GroupSpec
from labkit.wire.spec import WorkerSpec, gpu_of
from labkit.wire.transport import ControllerWire, Keys
from labkit.worker.groups.process_group import backend_of


def plan(world_size: int | None, device: str, num_gpus: int) -> PoolPlan:
    return make_plan(world_size, device, lambda: num_gpus)


@pytest.mark.parametrize(
    ("world_size", "device", "num_gpus", "line"),
    [
        (4, "auto", 4, "4 ranks, one GPU each, NCCL"),
        (2, "cuda", 8, "2 ranks, one GPU each, NCCL"),
        (None, "auto", 2, "2 ranks, one GPU each, NCCL"),
        (1, "auto", 1, "1 rank, one GPU each, NCCL"),
        (4, "auto", 1, "4 ranks, one GPU shared, gloo through host memory (NCCL needs one for each rank)"),
        (4, "cuda", 2, "4 ranks, 2 GPUs shared, gloo through host memory (NCCL needs one for each rank)"),
        (4, "auto", 0, "4 ranks, CPU processes, gloo (torch finds no GPU)"),
        (4, "cpu", 4, "4 ranks, CPU processes, gloo"),
    ],
)
def test_line_says_what_was_chosen_and_why(world_size: int | None, device: str, num_gpus: int, line: str) -> None:
    said = plan(world_size, device, num_gpus).describe()
    shares = "shared" in line
    assert said == line + (": times are not those of several GPUs" if shares else "")


def test_many_ranks_share_a_gpu_only_where_asked_to() -> None:
    many = MOST_ON_A_GPU + 1
    assert plan(many, "cuda", 1).shares_gpus
    chosen = plan(many, "auto", 1)
    assert chosen.device == "cpu"
    assert f"more than {MOST_ON_A_GPU} ranks for each of 1 GPU; device='cuda' shares" in chosen.describe()
    assert plan(2 * MOST_ON_A_GPU, "auto", 2).shares_gpus


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(InvalidPoolError, match="needs a GPU; torch finds none on this machine"):
        plan(4, "cuda", 0)


def test_several_machines_do_not_share() -> None:
    assert attached_plan(2, 4, "auto", 4).describe() == "8 ranks on 2 machines, one GPU each, NCCL"
    assert attached_plan(2, 4, "auto", 1).describe() == "8 ranks on 2 machines, CPU processes, gloo (one machine shows 1 GPU)"
    assert attached_plan(2, 4, "cpu", 1).describe() == "8 ranks on 2 machines, CPU processes, gloo"
    with pytest.raises(InvalidPoolError, match="one machine shows 1"):
        attached_plan(2, 4, "cuda", 1)
    assert attached_plan(1, 4, "auto", 1).shares_gpus


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "gpus"),
    [(4, 4, [0, 1, 2, 3]), (2, 8, [0, 1]), (4, 2, [0, 1, 0, 1]), (4, 1, [0, 0, 0, 0]), (5, 2, [0, 1, 0, 1, 0])],
)
def test_ranks_take_the_gpus_round_robin(num_ranks: int, num_gpus: int, gpus: list[int]) -> None:
    assert [gpu_of(rank, num_gpus) for rank in range(num_ranks)] == gpus
    chosen = plan(num_ranks, "cuda", num_gpus)
    assert [chosen.device_of(rank) for rank in range(num_ranks)] == [f"cuda:{gpu}" for gpu in gpus]


def test_device_of_a_rank_counts_from_zero_on_each_machine() -> None:
    assert [attached_plan(2, 2, "cuda", 2).device_of(rank) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert plan(2, "cpu", 0).device_of(1) == "cpu"


@pytest.mark.parametrize(
    ("device", "num_gpus", "backend"),
    [("cpu", 0, "gloo"), ("cuda", 4, "cpu:gloo,cuda:nccl"), ("cuda", 2, "cpu:gloo,cuda:gloo"), ("cuda", 1, "cpu:gloo,cuda:gloo")],
)
def test_ranks_that_share_form_their_groups_with_gloo(device: str, num_gpus: int, backend: str, tmp_path: Path) -> None:
    wire = ControllerWire(str(tmp_path), Keys.generate())
    try:
        spec = WorkerSpec(3, 3, 4, device, wire.endpoint, GroupSpec("", 0, 4), "", num_gpus=num_gpus)  # type: ignore[arg-type]
        assert backend_of(spec) == backend
        assert spec.shares_gpu is (backend == "cpu:gloo,cuda:gloo")
    finally:
        wire.close()
