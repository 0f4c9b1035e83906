"""Four ranks that share one GPU: what a step and a collective take over gloo through host memory. No figure for several GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import labkit
from tests.benchmarks.gpu_steps import DEVICE, REHEARSAL
from tests.benchmarks.table import Figures, seconds, show_seconds

pytestmark = [pytest.mark.timeout(200), *([] if REHEARSAL else [pytest.mark.gpu(1)])]

NUM_RANKS = 4
NUM_GROUPS = 8
WIDTH = 64 if REHEARSAL else 2048  # 33 million parameters in all
NUM_STEPS = 10


@pytest.fixture(scope="module")
def figures() -> Iterator[Figures]:
    gathered = Figures(f"GPU-shared ({NUM_RANKS} ranks on one GPU, gloo through host memory)")
    yield gathered
    gathered.finish()


@pytest.fixture(scope="module")
def pool(figures: Figures) -> Iterator[labkit.WorkerPool]:
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    labkit.WorkerPool(NUM_RANKS, device=DEVICE, replace=True).close()
    began = time.perf_counter()
    with labkit.WorkerPool(NUM_RANKS, device=DEVICE) as pool:
        figures.add("second pool", show_seconds(time.perf_counter() - began))
        yield pool
    patch.undo()


def step_s(device: str) -> float:
    """Return the seconds of a step of FSDP2 with Adam in float32, each layer a group of its own."""
    mesh = init_device_mesh(device, (NUM_RANKS,))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_GROUPS))).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(64, WIDTH, device=device)

    def steps(count: int) -> None:
        for _ in range(count):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finish(device)

    steps(3)
    dist.barrier()
    return seconds(lambda: steps(NUM_STEPS)) / NUM_STEPS


def all_reduce_s(device: str, num_elements: int) -> float:
    """Return the seconds of an all-reduce of float32."""
    tensor = torch.ones(num_elements, device=device)

    def work() -> None:
        dist.all_reduce(tensor)
        finish(device)

    for _ in range(3):
        work()
    return seconds(work, 5)


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def test_step_of_33_million_parameters_in_8_groups(pool: labkit.WorkerPool, figures: Figures) -> None:
    taken = max(pool.run(step_s, DEVICE, timeout_s=120).values())
    figures.add(
        f"step of {NUM_GROUPS * WIDTH * (WIDTH + 1):,} parameters in {NUM_GROUPS} groups, FSDP2, float32", show_seconds(taken)
    )


@pytest.mark.parametrize("num_elements", [1, 1 << 20, 1 << 25])
def test_all_reduce_beside_one_on_the_cpu(pool: labkit.WorkerPool, figures: Figures, num_elements: int) -> None:
    ours, theirs = (max(pool.run(all_reduce_s, device, num_elements, timeout_s=120).values()) for device in (DEVICE, "cpu"))
    figures.add(f"all-reduce of {4 * num_elements:,} bytes", show_seconds(ours), f"the same on CPU tensors {show_seconds(theirs)}")
