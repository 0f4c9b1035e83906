"""Formula, tracker and allocator agree on the memory of a step; bytes that save_on_cpu moves are counted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.spmd.memory.kinds import PARTS, MemoryParts, allocation_curve, held_memory, measured_peak, predict_memory, tracked_peak
from labkit.spmd.memory.spy import count_forwards, spy_save_on_cpu
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import ModelConfig, next_token_loss

CPU = torch.device("cpu")
CONFIG = ModelConfig(dim=32, num_layers=2, num_heads=2, hidden_dim=48, max_seq_len=32)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_formula_divides_all_but_the_activations() -> None:
    assert predict_memory(1000, world_size=4, activation_bytes=77) == MemoryParts(1000, 1000, 2000, 77)
    assert predict_memory(1000, num_moments=0, bytes_each=2).total == 4000


def test_what_a_model_holds_is_what_the_formula_says() -> None:
    model = build_model(CONFIG)
    optimizer = torch.optim.Adam(model.parameters())
    next_token_loss(model, next(BatchSampler(batch_size=2, seq_len=32))).backward()
    optimizer.step()
    held = held_memory(model, optimizer)
    expected = predict_memory(sum(parameter.numel() for parameter in model.parameters()))
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    counters = 4 * len(list(model.parameters()))
    assert held == MemoryParts(expected.parameters + buffers, expected.gradients, expected.optimizer + counters)


def test_tracker_and_allocator_see_the_same_peak(group: None) -> None:
    model = build_model(CONFIG)
    for module in (*model.layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters())
    batch = next(BatchSampler(batch_size=8, seq_len=32))

    def step() -> None:
        next_token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = held_memory(model, optimizer)
    tracked = tracked_peak(model, optimizer, (batch,), step)
    measured = measured_peak(step, CPU, held.total)
    assert tracked.total == pytest.approx(measured, rel=0.02)
    assert tracked.optimizer == held.optimizer
    assert all(getattr(tracked, part) > 0 for part in PARTS if part != "gradients")


def test_allocations_are_reported_as_they_come_and_go() -> None:
    def step() -> None:
        first = torch.ones(100_000)
        second = first + first
        del first
        second.sum()

    totals = [total for _, total in allocation_curve(step)]
    assert 800_000 <= max(totals) < 801_000
    assert abs(totals[-1]) < 1000


def test_the_profiler_s_own_log_stays_out(capfd: pytest.CaptureFixture[str]) -> None:
    before = [torch.ones(10)]
    allocation_curve(before.clear)
    assert capfd.readouterr().err == ""
    allocation_curve(lambda: os.write(2, b"the step's own words\n"))
    assert capfd.readouterr().err == "the step's own words\n"


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 32, bias=False), nn.Linear(8, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(x) * self.gate(x)
        return out


def test_save_on_cpu_moves_weights_and_what_is_saved_twice_twice() -> None:
    block = offload_wrapper(Feed())
    with spy_save_on_cpu() as counts:
        block(torch.ones(4, 8, requires_grad=True) * 1).sum().backward()
    x, hidden, weight = 4 * 8 * 4, 4 * 32 * 4, 8 * 32 * 4
    assert (counts.num_entered, counts.num_tensors) == (1, 6)
    assert counts.moved_bytes == 2 * x + 2 * hidden + 2 * weight
    with save_on_cpu():
        block(torch.ones(4, 8, requires_grad=True) * 1)
    assert counts.num_entered == 1  # the watch has ended
    assert "__enter__" not in vars(save_on_cpu)


def test_forwards_are_counted_with_their_recomputation() -> None:
    model = build_model(CONFIG)
    batch = next(BatchSampler(batch_size=2, seq_len=32))
    with count_forwards(model.layers) as counts:
        next_token_loss(model, batch).backward()
        next_token_loss(model, batch)
    model(batch[:, :-1])
    assert counts == [2, 2]
