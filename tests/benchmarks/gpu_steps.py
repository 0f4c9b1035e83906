"""Training steps for the GPU benchmarks, timed on the device.

``LABKIT_BENCH_REHEARSAL=1`` runs the benchmarks on a CPU with small models and states, to test the code without a GPU. The figures
then mean nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.base import machine
from labkit.spmd.model.transformer import ModelConfig, Transformer, next_token_loss, rotary_tables

REHEARSAL = os.environ.get("LABKIT_BENCH_REHEARSAL") == "1"
DEVICE = "cpu" if REHEARSAL else "cuda"
NUM_RANKS = 2 if REHEARSAL else min(4, len(machine.nvidia_gpus()))
BATCH = 4
Context = Callable[[], AbstractContextManager[Any]]


def wide(dim: int, num_layers: int = 12) -> ModelConfig:
    """A decoder with heads of 128 and Llama's hidden width, for 2,048 tokens. 12 layers of 2,048 are 617 million parameters."""
    full = ModelConfig(dim=dim, num_layers=num_layers, num_heads=dim // 128, hidden_dim=dim * 11 // 4, max_seq_len=2048)
    return replace(full, dim=64, num_layers=3, num_heads=2, hidden_dim=176, max_seq_len=64) if REHEARSAL else full


ONE_BILLION = wide(2048, num_layers=20)


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model whose weights are drawn on the device, equal on all ranks. `build_model` draws them on the CPU, which takes long."""
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=DEVICE)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        for buffer, table in zip((model.rope_cos, model.rope_sin), rotary_tables(config), strict=True):
            buffer.copy_(table)
    return model.to(dtype)


def random_tokens(config: ModelConfig) -> Tensor:
    """The same random bytes in every run, others on every rank: int64, (4, tokens + 1)."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(256, (BATCH, config.max_seq_len + 1), generator=generator).to(DEVICE)


@dataclass(frozen=True)
class Timed:
    """Steps of one rank.

    Attributes:
        forward_s, backward_s, step_s: The shortest of the timed steps, each for itself; ``step_s`` has the optimizer in it too.
            With several micro-batches a step, the last one's forward and backward.
        backward_peak_bytes: The most device memory in use before the optimizer's step.
        peak_bytes: The most device memory in use at all.
        loss: Of the last step.
    """

    forward_s: float
    backward_s: float
    step_s: float
    backward_peak_bytes: int
    peak_bytes: int
    loss: float


def time_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Tensor,
    num_steps: int,
    *,
    around: Context = nullcontext,
    micro_batches: int = 1,
) -> Timed:
    """Train and time each step. ``around`` is entered for forward only.

    Ranks: collective, where the model is sharded.
    """
    times, peaks, loss = [], [], torch.zeros(())
    for _ in range(num_steps):
        _reset_peak()
        dist.barrier()
        synchronize()
        begin = _mark()
        for _ in range(micro_batches):
            marks = [_mark()]
            with around():
                loss = next_token_loss(model, batch)
            marks.append(_mark())
            loss.backward()
            marks.append(_mark())
        # The allocator counts requests at once, no matter how far the device is, so there is no need to wait.
        before_optimizer = torch.cuda.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
        end = _mark()
        synchronize()
        times.append((_between(*marks[:2]), _between(*marks[1:]), _between(begin, end)))
        peaks.append((before_optimizer, torch.cuda.max_memory_allocated()))
    seconds = [min(column) for column in zip(*times, strict=True)]
    return Timed(*seconds, *(max(column) for column in zip(*peaks, strict=True)), loss.item())


def _reset_peak() -> None:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _mark() -> Any:
    if DEVICE == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    return end - begin if DEVICE == "cpu" else float(begin.elapsed_time(end)) / 1000
