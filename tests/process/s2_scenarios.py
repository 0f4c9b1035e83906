"""The ranks' side of the seed rows S2.1 to S2.3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.training import train
from labkit.spmd.model.transformer import Block, ModelConfig
from labkit.spmd.shards.meshes import make_mesh, shard_2d
from labkit.spmd.shards.parity import compare
from labkit.spmd.shards.records import Parity
from labkit.spmd.shards.sharding import shard_model

# No size is a multiple of 2, 3 and 4 at once, except those that tensor parallelism divides: two heads and 54 hidden features.
UNEVEN = ModelConfig(vocab_size=251, dim=20, num_layers=1, num_heads=2, hidden_dim=54, max_seq_len=16)
SIZES = (2, 3, 4, 5)
STEPS_BEFORE, STEPS_AFTER = 3, 3
Form = Literal["FULL", "SHARDED"]
PLAN = {
    **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
    **{f"layers.*.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(),
}


def mesh_of_all(device: str) -> Any:
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))


def both_state_dicts(device: str, size: int, reshard: bool) -> tuple[Parity, list[str], bool]:
    """S2.1: the module's own state dict beside the one of the state-dict API, after a forward.

    Returns:
        The comparison, the kinds of tensors in the module's own dict, and whether a block was whole before it was asked.
    """
    torch.manual_seed(size)
    model = nn.Sequential(nn.Linear(size, size + 1), nn.ReLU(), nn.Linear(size + 1, size)).to(device)
    mesh = mesh_of_all(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, size, device=device))
    whole = not isinstance(model[0].weight, DTensor)
    own = model.state_dict()
    kinds = sorted({type(value).__name__ for value in own.values()})
    return compare(own, get_model_state_dict(model)), kinds, whole


@dataclass(frozen=True)
class Offloaded:
    """S2.2: the full state that one rank got.

    Attributes:
        num_entries: Entries of the dict.
        devices: Where its tensors are.
        plain: Whether none of them is a DTensor.
        parity: Against the model that was not sharded; None if the dict is empty.
    """

    num_entries: int
    devices: list[str]
    plain: bool
    parity: Parity | None


def full_on_rank_0(device: str) -> Offloaded:
    """S2.2: ``full_state_dict`` with ``cpu_offload``."""
    source = build_model(UNEVEN, seed=4)
    model = shard_model(build_model(UNEVEN, seed=4, device=device), mesh_of_all(device), blocks=Block)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    devices = sorted({value.device.type for value in full.values()})
    plain = not any(isinstance(value, DTensor) for value in full.values())
    return Offloaded(len(full), devices, plain, compare(full, source) if full else None)


def _batches(device: str, rank: int, world_size: int, position: int) -> BatchSampler:
    batches = BatchSampler(batch_size=12, seq_len=12, seed=2, rank=rank, world_size=world_size, device=device)
    batches.text = batches.text % UNEVEN.vocab_size
    batches.position = position
    return batches


def train_fsdp1_and_save(rank: int, device: str, form: Form, use_orig_params: bool, folder: str) -> list[float]:
    """S2.3: train with FSDP1 and Adam, save with DCP, continue; the later losses are the truth."""
    world_size, where = dist.get_world_size(), torch.device(device)
    model = FSDP(
        build_model(UNEVEN, seed=4, device=where),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=where,
        use_orig_params=use_orig_params,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = _batches(device, rank, world_size, 0)
    train(model, optimizer, batches, STEPS_BEFORE)
    # offload_to_cpu=True on a CPU crashes, or lets the two moments share one buffer.
    offload = {"offload_to_cpu": where.type != "cpu"}
    configs = (FullStateDictConfig(**offload), FullOptimStateDictConfig(**offload)) if form == "FULL" else ()
    with FSDP.state_dict_type(model, StateDictType[f"{form}_STATE_DICT"], *configs):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/saved")
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(**offload), FullOptimStateDictConfig(**offload)
    ):
        whole = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)["state"]}
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    return train(model, optimizer, batches, STEPS_AFTER)


@dataclass(frozen=True)
class Continued:
    """S2.3: the observations of a rank under FSDP2.

    Attributes:
        untouched: Keys that differed before the load; all parameters have to.
        weights: The model after the load against FSDP1's whole state.
        moments: The same for Adam's moments and steps.
        learning_rate: The optimizer's after the load.
        losses: Of the steps after it.
    """

    untouched: int
    weights: Parity
    moments: Parity
    learning_rate: float
    losses: list[float]


def load_in_fsdp2(rank: int, device: str, two_axes: bool, folder: str) -> Continued:
    """S2.3: load FSDP1's checkpoint into FSDP2, on the present number of ranks, and continue training."""
    model = build_model(UNEVEN, seed=5, device=device)
    if two_axes:
        mesh = make_mesh(device)
        shard_2d(model, mesh, PLAN, blocks=Block)
        place, num_places = mesh.get_local_rank("dp"), mesh["dp"].size()
    else:
        shard_model(model, mesh_of_all(device), blocks=Block)
        place, num_places = rank, dist.get_world_size()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    whole = torch.load(f"{folder}/whole.pt", map_location="cpu")
    state: dict[str, Any] = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    untouched = len(compare(state["model"], whole["model"]).differences)
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return Continued(
        untouched,
        compare(get_model_state_dict(model), whole["model"]),
        compare(get_optimizer_state_dict(model, optimizer)["state"], whole["optimizer"]),
        optimizer.param_groups[0]["lr"],
        train(model, optimizer, _batches(device, place, num_places, STEPS_BEFORE), STEPS_AFTER),
    )
