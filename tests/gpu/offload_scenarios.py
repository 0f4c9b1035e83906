"""The ranks' side of tests/gpu/test_offload.py: a model of wide blocks, trained in several ways, with times and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import ModelConfig, Transformer, next_token_loss
from labkit.spmd.offload.context import MIB, ActivationOffload
from labkit.spmd.offload.measure import apply_plan, measure_blocks, measure_bus
from labkit.spmd.offload.plan import Bus, OffloadPlan, Setting, plan_blocks
from tests.benchmarks.gpu_steps import DEVICE, Context, Timed, random_model, random_tokens, time_steps, wide

NARROW = ModelConfig(dim=256, num_layers=4, num_heads=4, hidden_dim=512, max_seq_len=256)
WARM_UP, TIMED = 3, 5
WAYS = ("keep", "offload_wrapper", "recompute", "labkit", "labkit, half in flight", "labkit, inputs and recompute")
#: The streaming offload that came from torchtune, where trl is installed.
TRL = "OffloadActivations of trl"
PLANNED = "labkit, planned"
REHEARSED = Bus(1e9, 1e9)  # a CPU has no bus to measure


@dataclass(frozen=True)
class Measured:
    """One way to train, on one rank.

    Attributes:
        timed: Times, and the peak over all timed steps.
        moved_bytes, fetched_bytes: Of one step, by labkit's offload.
        num_late: Storages of one step that backward had to wait for without having asked ahead.
        host_bytes: Pinned memory as labkit counts it.
        pinned_bytes: Pinned memory that torch's allocator holds.
        plan: The plan.
    """

    timed: Timed
    moved_bytes: int = 0
    fetched_bytes: int = 0
    num_late: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    plan: OffloadPlan | None = None


def wrap_blocks(model: Transformer, way: str) -> None:
    """Apply torch's own wrappers, if the way is one of theirs."""
    wrap = offload_wrapper if way == "offload_wrapper" else checkpoint_wrapper if way.endswith("recompute") else None
    for place, block in enumerate(model.layers):
        model.layers[place] = wrap(block) if wrap else block


def shard(model: Transformer) -> None:
    """FSDP2 over all ranks."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)


def in_flight_bytes(config: ModelConfig) -> int:
    """Three of the largest storages of a block, of which a product uses two at a time: 256 MiB for a width of 2,048."""
    return 256 * MIB * config.dim // 2048


def offloaded(model: Transformer, way: str) -> ActivationOffload | None:
    """Apply labkit's offload to the blocks, if the way is one of its."""
    if not way.startswith("labkit"):
        return None
    limit = in_flight_bytes(model.config)
    if "inputs" in way:
        # An input is small, and a block's computation long beside its copy: two on their way are enough.
        return ActivationOffload(model.layers, max_in_flight_bytes=limit // 4)
    # The last block's activations are needed first.
    return ActivationOffload(model.layers[:-1], max_in_flight_bytes=limit // 2 if "half" in way else limit)


def measure(
    way: str, config: ModelConfig | None = None, *, micro_batches: int = 1, limit_bytes: int = 0, keep_peak_bytes: int = 0
) -> Measured:
    """Train a model in bfloat16 for some steps.

    Args:
        way: One of `WAYS`, `TRL` or `PLANNED`.
        config: The model; the one with a width of 2,048 by default.
        micro_batches: Forwards and backwards whose gradients add up in a step.
        limit_bytes: For a plan: the most device memory.
        keep_peak_bytes: For a plan: the most that was in use before the optimizer's step when everything was kept.
    """
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    config = config or wide(2048)
    model = random_model(config, torch.bfloat16)
    wrap_blocks(model, way)
    shard(model)
    optimizer, batch = torch.optim.Adam(model.parameters(), lr=1e-4), random_tokens(config)
    plan = None
    if way == PLANNED:
        plan = _planned(model, batch, limit_bytes, keep_peak_bytes)
        offload = apply_plan(model.layers, plan, max_in_flight_bytes=in_flight_bytes(config))
    else:
        offload = offloaded(model, way)
    around: Context = _trl(model) if way == TRL else nullcontext
    time_steps(model, optimizer, batch, WARM_UP, around=around, micro_batches=micro_batches)
    if offload:
        offload.reset_counts()
    timed = time_steps(model, optimizer, batch, TIMED, around=around, micro_batches=micro_batches)
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if DEVICE == "cuda" else 0
    if offload is None:
        return Measured(timed, pinned_bytes=pinned, plan=plan)
    counts, host = offload.counts, offload.host_bytes
    offload.close()
    moved = counts.moved_bytes // TIMED, counts.fetched_bytes // TIMED, counts.num_late // TIMED
    return Measured(timed, *moved, host, pinned, plan)


def _planned(model: Transformer, batch: Tensor, limit_bytes: int, keep_peak_bytes: int) -> OffloadPlan:
    def step() -> None:
        next_token_loss(model, batch).backward()
        model.zero_grad()

    costs = measure_blocks(model.layers, step, repeats=3)
    # Keeping everything peaks when backward begins, before there are gradients; other choices may peak when all are there.
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in map(_local, model.parameters()))
    fixed = keep_peak_bytes - sum(cost.saved_bytes for cost in costs) + gradients
    return plan_blocks(
        costs, Setting(bandwidth(), fixed, max_in_flight_bytes=in_flight_bytes(model.config)), limit_bytes=limit_bytes
    )


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _trl(model: Transformer) -> Context:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    context = get_act_offloading_ctx_manager(model, warn_if_no_head=False)
    return lambda: context


def bandwidth() -> Bus:
    """Measure this rank's bus in both directions at once, while all ranks use theirs."""
    if DEVICE == "cpu":
        return REHEARSED
    dist.barrier()
    return measure_bus(torch.device("cuda", torch.cuda.current_device()), size_bytes=1 << 30, repeats=5)


def one_way() -> Bus:
    """Measure this rank's bus in one direction at a time, as forward and backward use it, while all ranks use theirs."""
    if DEVICE == "cpu":
        return REHEARSED
    dist.barrier()
    device = torch.device("cuda", torch.cuda.current_device())
    on_device = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    host = torch.ones(1 << 30, dtype=torch.uint8, pin_memory=True)
    return Bus(*(_copy_rate(target, source) for target, source in ((host, on_device), (on_device, host))))


def _copy_rate(target: Tensor, source: Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(4):
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(source.numel() / (begin.elapsed_time(end) / 1000))
    return max(rates)


def exact(way: str, num_steps: int = 3) -> tuple[bool, int]:
    """Compare a small model's gradients and weights with those of training that keeps everything, and count moved bytes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            kept, _ = _trained("keep", num_steps)
            other, moved = _trained(way, num_steps)
    finally:
        torch.use_deterministic_algorithms(False)
    equal = [torch.equal(mine, theirs) for mine, theirs in zip(other, kept, strict=True)]
    return all(equal), moved


def _trained(way: str, num_steps: int) -> tuple[list[Tensor], int]:
    model = build_model(NARROW, seed=1, device="cuda")
    wrap_blocks(model, way)
    shard(model)
    offload = offloaded(model, way)
    if offload:
        # So small that every tensor has to wait for others, and with storages that travel alone.
        offload.max_in_flight_bytes, offload.min_bytes = 3 * MIB, 1
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=1e-2), random_tokens(NARROW)
    found: list[Tensor] = []
    for _ in range(num_steps):
        next_token_loss(model, batch).backward()
        found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found, offload.counts.moved_bytes if offload else 0


def races(num_rounds: int = 30) -> bool:
    """Exact gradients although the stream that computes is kept busy and memory is handed on at once."""
    expected = _with_noise(offloaded=False, num_rounds=1)[0]
    return all(torch.equal(mine, expected) for mine in _with_noise(offloaded=True, num_rounds=num_rounds))


def _with_noise(offloaded: bool, num_rounds: int) -> list[Tensor]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh()) for _ in range(8))).cuda()
    offload = ActivationOffload(list(layers), max_in_flight_bytes=5 * MIB, min_bytes=1) if offloaded else None
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    spin: Callable[[int], None] = torch.cuda._sleep
    found = []
    for place in range(num_rounds):
        x.grad = None
        spin(1_000_000 * (place % 3))
        loss = layers(x).square().mean()
        del_me = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]  # a read of freed memory gets this
        del del_me
        spin(1_000_000 * (place % 2))
        loss.backward()
        assert x.grad is not None
        found.append(x.grad.clone())
    if offload:
        offload.close()
    return found
