"""What tests/gpu/test_offload.py runs on the ranks: a model of 12 wide blocks trained in several ways, timed and weighed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.spmd.initialize import build_model
from labkit.spmd.model import ModelConfig, Transformer, next_token_loss
from labkit.spmd.offload import MIB, ActivationOffload
from labkit.spmd.offload_measure import measure_bus
from labkit.spmd.offload_plan import Bus

WIDE = ModelConfig(dim=2048, num_layers=12, num_heads=16, hidden_dim=5632, max_seq_len=2048)
NARROW = ModelConfig(dim=256, num_layers=4, num_heads=4, hidden_dim=512, max_seq_len=256)
BATCH, WARM_UP, TIMED = 4, 3, 5
WAYS = ("keep", "offload_wrapper", "recompute", "labkit", "labkit, 128 MiB", "labkit, inputs and recompute")


@dataclass(frozen=True)
class Measured:
    """One way to train, on one rank.

    Attributes:
        forward_s, backward_s, step_s: The fastest of the timed steps; the optimizer's step is in ``step_s`` only.
        peak_bytes: ``max_memory_allocated`` over all timed steps.
        moved_bytes, fetched_bytes: Of one step, by labkit's offload.
        num_late: Storages of one step that backward had to wait for without having asked ahead.
        host_bytes: Pinned memory.
    """

    forward_s: float
    backward_s: float
    step_s: float
    peak_bytes: int
    moved_bytes: int = 0
    fetched_bytes: int = 0
    num_late: int = 0
    host_bytes: int = 0


def prepared(way: str, config: ModelConfig, dtype: torch.dtype) -> tuple[Transformer, ActivationOffload | None]:
    """The model, wrapped, sharded by FSDP2, and offloaded."""
    model = build_model(config, seed=1, device="cuda").to(dtype)
    wrap = offload_wrapper if way == "offload_wrapper" else checkpoint_wrapper if way.endswith("recompute") else None
    for place, block in enumerate(model.layers):
        model.layers[place] = wrap(block) if wrap else block
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    if not way.startswith("labkit"):
        return model, None
    limit = 128 * MIB if "128" in way else 256 * MIB
    # The last block's activations are needed first; its inputs may as well go with the others'.
    blocks = list(model.layers) if "inputs" in way else list(model.layers[:-1])
    return model, ActivationOffload(blocks, max_in_flight_bytes=limit)


def tokens(config: ModelConfig) -> Tensor:
    """The same random bytes in every run, others on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(256, (BATCH, config.max_seq_len + 1), generator=generator).cuda()


def measure(way: str) -> Measured:
    """Train the wide model in bfloat16 for some steps."""
    gc.collect()
    torch.cuda.empty_cache()
    model, offload = prepared(way, WIDE, torch.bfloat16)
    optimizer, batch = torch.optim.Adam(model.parameters(), lr=1e-4), tokens(WIDE)
    times = [_timed_step(model, optimizer, batch) for _ in range(WARM_UP)]
    if offload:
        offload.reset_counts()
    torch.cuda.reset_peak_memory_stats()
    times = [_timed_step(model, optimizer, batch) for _ in range(TIMED)]
    forward_s, backward_s, step_s = (min(column) for column in zip(*times, strict=True))
    peak = torch.cuda.max_memory_allocated()
    if offload is None:
        return Measured(forward_s, backward_s, step_s, peak)
    counts, host = offload.counts, offload.host_bytes
    offload.close()
    return Measured(
        forward_s,
        backward_s,
        step_s,
        peak,
        counts.moved_bytes // TIMED,
        counts.fetched_bytes // TIMED,
        counts.num_late // TIMED,
        host,
    )


def _timed_step(model: Transformer, optimizer: torch.optim.Optimizer, batch: Tensor) -> tuple[float, float, float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    dist.barrier()
    torch.cuda.synchronize()
    marks[0].record()
    loss = next_token_loss(model, batch)
    marks[1].record()
    loss.backward()
    marks[2].record()
    optimizer.step()
    optimizer.zero_grad()
    marks[3].record()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1000 for begin, end in ((marks[0], marks[1]), (marks[1], marks[2]), (marks[0], marks[3]))]
    return seconds[0], seconds[1], seconds[2]


def bandwidth() -> Bus:
    """Of this rank's bus while all ranks use theirs, both ways."""
    dist.barrier()
    return measure_bus(torch.device("cuda", torch.cuda.current_device()), size_bytes=1 << 30, repeats=5)


def exact(way: str, num_steps: int = 3) -> tuple[bool, int]:
    """Whether gradients and weights of a small model equal those of training that keeps everything; and what moved."""
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
    model, offload = prepared(way, NARROW, torch.float32)
    if offload:
        # So small that every tensor has to wait for others, and with storages that travel alone.
        offload.max_in_flight_bytes, offload.min_bytes = 3 * MIB, 1
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=1e-2), tokens(NARROW)
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
        del_me = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]  # whoever reads freed memory reads this
        del del_me
        spin(1_000_000 * (place % 2))
        loss.backward()
        assert x.grad is not None
        found.append(x.grad.clone())
    if offload:
        offload.close()
    return found
