"""The ranks' side of the seed rows S0.1 to S0.4; run on gloo by tests/process and on NCCL by tests/gpu."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block, ModelConfig, Transformer
from labkit.spmd.shards.parity import compare
from labkit.spmd.shards.records import Parity
from labkit.spmd.shards.sharding import shard_model

# No size is a multiple of 2 and 4 at once, so some shards are uneven on 2 and most on 4 ranks.
UNEVEN = ModelConfig(vocab_size=251, dim=22, num_layers=2, num_heads=1, hidden_dim=27, max_seq_len=16)

Shape = Callable[[Transformer, DeviceMesh], nn.Module]
LoadPath = Literal["full", "broadcast", "sharded", "torch.save", "dcp"]
LOAD_PATHS: tuple[LoadPath, ...] = ("full", "broadcast", "sharded", "torch.save", "dcp")


@dataclass(frozen=True)
class RoundTrip:
    """One save and load, as one rank saw it.

    Attributes:
        saved: The saved full state against the local model's.
        zeroed: The copy to be loaded, against the local model before the load. It has to differ in every key.
        loaded: The copy against the model that was saved, after the load.
        outputs_equal: Whether both compute the same logits.
        tied: Whether head and embedding of the loaded copy are one parameter.
        rank_zero_only: Whether ranks above 0 got an empty state if only rank 0 was to hold it.
    """

    saved: Parity
    zeroed: Parity
    loaded: Parity
    outputs_equal: bool
    tied: bool
    rank_zero_only: bool


def world_mesh(device: str) -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))


def by_policy(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """S0.1: the root, with the blocks as units."""
    return shard_model(model, mesh, blocks=Block)


def submodules_only(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """S0.2: both blocks, the rest plain."""
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    return model


def blocks_ignoring_the_first(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """S0.3: the parameters of a whole block stay plain."""
    return shard_model(model, mesh, blocks=Block, ignored_params=model.layers[0].parameters())


def mixed_hsdp(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """S0.4: block 0 sharded; the rest replicated by sharding it over one rank per replica."""
    two_axes = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model, mesh=two_axes)
    return model


def mixed_replicate(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """S0.4: block 0 sharded; the rest under FSDP2's replicate."""
    fully_shard(model.layers[0], mesh=mesh)
    replicate_fsdp(model, mesh=mesh)
    return model


def mixed_ddp(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """S0.4: block 0 sharded; the rest under composable DDP."""
    fully_shard(model.layers[0], mesh=mesh)
    replicate_ddp(model, ignored_modules=[model.layers[0]])
    return model


SHAPES: dict[str, Shape] = {
    shape.__name__: shape
    for shape in (by_policy, submodules_only, blocks_ignoring_the_first, mixed_hsdp, mixed_replicate, mixed_ddp)
}


def round_trip(device: str, shape: str, path: LoadPath, folder: str) -> RoundTrip:
    """Save a model in one way, load it into a zeroed copy, compare everything with the model that was not sharded."""
    mesh = world_mesh(device)
    local = build_model(UNEVEN, seed=1, device=device)
    source = SHAPES[shape](build_model(UNEVEN, seed=1, device=device), mesh)
    target = SHAPES[shape](build_model(UNEVEN, seed=1, device=device), mesh)
    with torch.no_grad():
        for tensor in (*target.parameters(), *target.buffers()):
            tensor.zero_()
    saved = compare(get_model_state_dict(source, options=StateDictOptions(full_state_dict=True)), local)
    zeroed = compare(target, local)
    rank_zero_only = load(source, target, path, folder)
    tokens = torch.arange(12, device=device).view(1, 12)
    return RoundTrip(
        saved,
        zeroed,
        compare(target, source),
        torch.equal(source(tokens), target(tokens)),
        target.head.weight is target.embed.weight,  # type: ignore[union-attr]
        rank_zero_only,
    )


def load(source: nn.Module, target: nn.Module, path: LoadPath, folder: str) -> bool:
    """Move the state of one model into another; return False if a rank above 0 got a state that only rank 0 was to hold."""
    if path == "full":
        full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
        set_model_state_dict(target, full, options=StateDictOptions(full_state_dict=True))
    elif path == "broadcast":
        full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        set_model_state_dict(target, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        return bool(full) == (dist.get_rank() == 0)
    elif path == "sharded":
        copied = {name: tensor.clone() for name, tensor in get_model_state_dict(source).items()}
        target.load_state_dict(copied)
    elif path == "torch.save":
        buffer = io.BytesIO()
        torch.save(get_model_state_dict(source), buffer)
        buffer.seek(0)
        set_model_state_dict(target, torch.load(buffer, weights_only=True))
    else:
        dcp.save({"model": get_model_state_dict(source)}, checkpoint_id=folder)
        state: dict[str, Any] = {"model": get_model_state_dict(target)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(target, state["model"])
    return True


def train_mixed(device: str, shape: str, num_steps: int) -> tuple[list[float], Parity]:
    """Losses of some Adam steps, and the trained weights against those of the same model sharded whole (S0.1)."""
    mesh = world_mesh(device)
    models = [SHAPES[kind](build_model(UNEVEN, seed=1, device=device), mesh) for kind in (shape, "by_policy")]
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(251, (2, 13), generator=generator).to(device) for _ in range(num_steps)]
    losses = [_train(model, batches) for model in models]
    full = StateDictOptions(full_state_dict=True)
    mixed, whole = (get_model_state_dict(model, options=full) for model in models)
    if device == "cpu" and dist.get_world_size() == 2:
        return losses[0], compare(mixed, whole)  # two numbers have one sum
    return losses[0], compare(mixed, whole, rtol=1e-4, atol=1e-6)


def _train(model: nn.Module, batches: list[Tensor]) -> list[float]:
    from labkit.spmd.model.training import train

    # foreach=False: on a GPU the default is one fused update, which cannot mix sharded and plain tensors.
    return train(model, torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False), iter(batches), len(batches))


def plain_parameters_drift(device: str) -> float:
    """S0.2's price: the difference of the plain head between ranks after one step, because its gradient is not averaged."""
    model = submodules_only(build_model(UNEVEN, seed=1, device=device), world_mesh(device))
    generator = torch.Generator().manual_seed(dist.get_rank())
    _train(model, [torch.randint(251, (2, 13), generator=generator).to(device)])
    mine = model.head.weight.detach()  # type: ignore[union-attr]
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    return max(float((other - others[0]).abs().max()) for other in others)
