"""Small models and training runs for checkpoint tests, on ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CPU = torch.device("cpu")


class Net(nn.Module):
    """Uneven dims (1, 2, 3, 5, 6, 7), a buffer, a frozen parameter and a tied pair."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5))
        self.frozen = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.Parameter(torch.randn(3, 2))
        self.one = nn.Parameter(torch.randn(1))
        self.register_buffer("scale", torch.tensor([1.5, 2.0, 0.5, 1.0, 1.0]))
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.odd.sum() * self.one
        hidden = hidden + self.block(hidden * self.scale)
        return self.head(self.norm(self.frozen(hidden)))


def adam(model: nn.Module) -> torch.optim.AdamW:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    first = [p for name, p in named if "block" in name]
    second = [p for name, p in named if "block" not in name]
    return torch.optim.AdamW([{"params": first, "lr": 0.01}, {"params": second, "lr": 0.02, "weight_decay": 0.1}])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        tokens = torch.arange(8).add(step).remainder(7)
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp2(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    fully_shard(model.block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)
    return model


def fsdp1(model: nn.Module, *, use_orig_params: bool = True, mesh: DeviceMesh | None = None) -> nn.Module:
    options: dict[str, Any] = {"device_id": CPU, "use_orig_params": use_orig_params, "device_mesh": mesh}
    frozen = list(model.frozen.parameters()) if not use_orig_params else None  # type: ignore[union-attr]
    model.block = FSDP(model.block, **options)  # type: ignore[arg-type]
    return FSDP(model, ignored_states=frozen, **options)


def two_d(model: nn.Module, dp: int, tp: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    parallelize_module(model.block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})  # type: ignore[arg-type]
    return fsdp2(model, mesh["dp"])


Form = Literal["full", "sharded", "local"]


def plain_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """The state of a fresh Net, unsharded."""
    return Net(seed).state_dict()
