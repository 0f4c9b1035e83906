"""The ranks' side of the seed rows S3.1 and S3.2: the same training under every strategy, and the runtime's events in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss
from labkit.spmd.shards.sharding import shard_model
from labkit.spmd.trace.events import Trace
from labkit.spmd.trace.recorder import record_events

SMALL = ModelConfig(dim=16, num_layers=3, num_heads=4, hidden_dim=24, max_seq_len=32)
WRAPS = ("auto", "manual")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
NUM_STEPS = 5

Wrap = Callable[[Transformer], nn.Module]


def mesh_of_all(device: str) -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))


def hybrid_mesh(device: str) -> DeviceMesh:
    """Two replicas on four ranks, else one. FSDP1 gets a shard axis of one rank wrong."""
    world_size = dist.get_world_size()
    num_replicas = 2 if world_size >= 4 and world_size % 2 == 0 else 1
    return init_device_mesh(device, (num_replicas, world_size // num_replicas), mesh_dim_names=("replicate", "shard"))


def replica_mesh(device: str) -> DeviceMesh:
    """Every rank a replica of its own."""
    return init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))


def small_model(device: str, dtype: torch.dtype = torch.float32, num_layers: int = 3) -> Transformer:
    """The same weights on every rank."""
    config = ModelConfig(dim=16, num_layers=num_layers, num_heads=4, hidden_dim=24, max_seq_len=32)
    return build_model(config, seed=3, device=device).to(dtype)


def wrap_fsdp1(model: Transformer, device: str, wrap: str, strategy: str, **options: Any) -> nn.Module:
    """FSDP1 as the seed has it: every block and the root, or one block by hand and the root."""
    here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    mesh = hybrid_mesh(device) if strategy == "HYBRID_SHARD" else None
    arguments: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[strategy],
        "device_id": here,
        "use_orig_params": True,
        "device_mesh": mesh,
        **options,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
        if wrap == "auto":
            return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)
        model.layers[1] = FullyShardedDataParallel(model.layers[1], **arguments)
        return FullyShardedDataParallel(model, **arguments)


def wrap_fsdp2(model: Transformer, device: str, wrap: str, strategy: str) -> FSDPModule:
    """The FSDP2 replacement of each of FSDP1's strategies."""
    meshes = {"HYBRID_SHARD": hybrid_mesh, "NO_SHARD": replica_mesh}
    mesh = meshes.get(strategy, mesh_of_all)(device)
    blocks = list(model.layers) if wrap == "auto" else [model.layers[1]]
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=strategy not in ("SHARD_GRAD_OP", "NO_SHARD"))
    return fully_shard(model, mesh=mesh)


def batches(device: str, num: int = NUM_STEPS, seed: int = 0) -> list[Tensor]:
    """This rank's batches of text."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = BatchSampler(batch_size=12, seq_len=16, seed=seed, rank=rank, world_size=world_size, device=device)
    return [next(sampler) for _ in range(num)]


def losses_of(model: nn.Module, device: str, num_steps: int = NUM_STEPS) -> list[float]:
    """This rank's own loss before each of some Adam steps, not averaged, so that a fault on one rank shows."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(device, num_steps):
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_pair(device: str, wrap: str, strategy: str, dtype_name: str) -> tuple[list[float], list[float]]:
    """S3.1: losses of FSDP1 and of FSDP2 with the same wrapping and the matching strategy."""
    dtype = getattr(torch, dtype_name)
    old = losses_of(wrap_fsdp1(small_model(device, dtype), device, wrap, strategy), device)
    new = losses_of(wrap_fsdp2(small_model(device, dtype), device, wrap, strategy), device)
    return old, new


def train_ddp(device: str, dtype_name: str) -> list[float]:
    """The same training under DDP."""
    model = small_model(device, getattr(torch, dtype_name))
    return losses_of(DistributedDataParallel(model), device)


def train_single(device: str, dtype_name: str) -> list[float]:
    """The same training on one rank that averages the gradients of all batches itself; this rank's loss in it."""
    model = small_model(device, getattr(torch, dtype_name))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches(device):
        everybody = [torch.empty_like(batch) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, batch)
        optimizer.zero_grad(set_to_none=True)
        for rank, part in enumerate(everybody):
            loss = next_token_loss(model, part)
            loss.backward()
            if rank == dist.get_rank():
                losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return losses


def traced(model: nn.Module, device: str, num_steps: int = 1) -> Trace:
    """Events of training steps, after one that is not recorded: the first step also initialises."""
    first, *others = batches(device, num_steps + 1)
    next_token_loss(model, first).backward()
    model.zero_grad(set_to_none=True)
    with record_events(model) as recording:
        for batch in others:
            next_token_loss(model, batch).backward()
            model.zero_grad(set_to_none=True)
    return recording.trace()


def traced_fsdp1(device: str, wrap: str, strategy: str, prefetch: str = "BACKWARD_PRE") -> Trace:
    """S3.2: one step of FSDP1."""
    option = {"backward_prefetch": None if prefetch == "none" else BackwardPrefetch[prefetch]}
    return traced(wrap_fsdp1(small_model(device), device, wrap, strategy, **option), device)


def traced_fsdp2(device: str, wrap: str, strategy: str) -> Trace:
    """S3.2: one step of FSDP2."""
    return traced(wrap_fsdp2(small_model(device), device, wrap, strategy), device)


def sharded(reshard: bool | int | None = None, num_layers: int = 3) -> Transformer:
    """FSDP2 around every block and the root."""
    return shard_model(small_model("cpu", num_layers=num_layers), mesh_of_all("cpu"), blocks=Block, reshard_after_forward=reshard)


def default() -> Trace:
    """A step with every default."""
    return traced(sharded(), "cpu")


def kept_after_forward() -> Trace:
    """A step that does not free the blocks after forward."""
    return traced(sharded(reshard=False), "cpu")
