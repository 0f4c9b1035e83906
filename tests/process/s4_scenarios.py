"""The ranks' side of the seed rows S4.1 to S4.4; run on gloo by tests/process and on NCCL by tests/gpu."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block, ModelConfig, next_token_loss
from labkit.spmd.shards.meshes import check_mesh, fsdp1_extended, fsdp1_over_tp
from labkit.spmd.shards.parity import compare
from labkit.spmd.shards.records import Parity
from labkit.spmd.shards.sharding import shard_model
from labkit.spmd.shards.tensor_parallel import tensor_parallel_plan

Api = Literal["fsdp1", "fsdp1_orig", "fsdp2"]
Order = tuple[str, str]
OUTSIDE: Order = ("dp", "tp")
INSIDE: Order = ("tp", "dp")

# In the uneven model each TP rank has 27 hidden features, which two FSDP ranks cannot share evenly, nor can they 251 rows.
CONFIGS = {
    "even": ModelConfig(vocab_size=64, dim=16, num_layers=1, num_heads=2, hidden_dim=24, max_seq_len=16),
    "uneven": ModelConfig(vocab_size=251, dim=20, num_layers=1, num_heads=2, hidden_dim=54, max_seq_len=16),
}
FULL = StateDictOptions(full_state_dict=True)


def quiet() -> None:
    """Ignore two known warnings: FSDP1 is deprecated, and gathers over two axes warn."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def mesh_of(device: str, dp: int, order: Order = OUTSIDE) -> DeviceMesh:
    """A mesh with ``dp`` ranks on its dp axis."""
    tp = dist.get_world_size() // dp
    return init_device_mesh(device, (dp, tp) if order == OUTSIDE else (tp, dp), mesh_dim_names=order)


def build(config: ModelConfig, mesh: DeviceMesh, api: Api, *, seed: int = 1) -> nn.Module:
    """TP, then FSDP1 or FSDP2, with torch's own calls and without labkit's checks."""
    model = build_model(config, seed=seed, device=mesh.device_type)
    parallelize_module(model, mesh["tp"], tensor_parallel_plan())
    if api == "fsdp2":
        return shard_model(model, mesh["dp"], blocks=Block)
    return wrap_fsdp1(model, mesh["dp"], orig=api == "fsdp1_orig")


def wrap_fsdp1(model: nn.Module, mesh: DeviceMesh, *, orig: bool) -> FullyShardedDataParallel:
    """FSDP1 over a mesh of one axis, with sharded state dicts."""
    device = torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    wrapped = FullyShardedDataParallel(model, device_mesh=mesh, device_id=device, use_orig_params=orig)
    FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT)
    return wrapped


def batches(config: ModelConfig, mesh: DeviceMesh, num: int) -> list[tuple[Tensor, Tensor]]:
    """For each step, the batch of this rank's place on the dp axis, and the whole batch."""
    generator = torch.Generator().manual_seed(7)
    dp, place = mesh["dp"].size(), mesh.get_local_rank("dp")
    whole = [torch.randint(config.vocab_size, (2 * dp, 13), generator=generator).to(mesh.device_type) for _ in range(num)]
    return [(batch[2 * place : 2 * place + 2], batch) for batch in whole]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    next_token_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


# S4.1 ------------------------------------------------------------------------------------------------------------------


def composition(device: str, dp: int, api: Api, order: Order, folder: str) -> tuple[Parity, Parity]:
    """Train a step on a mesh of this order, save with DCP, load whole: the outputs and the loaded weights against the truth."""
    quiet()
    config = CONFIGS["even"]
    mesh = mesh_of(device, dp, order)
    model, reference = build(config, mesh, api), build_model(config, seed=1, device=device)
    optimizer, reference_optimizer = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, reference))
    ((mine, whole),) = batches(config, mesh, 1)
    step(model, optimizer, mine)
    step(reference, reference_optimizer, whole)
    with torch.no_grad():
        outputs = compare({"logits": model(mine[:, :-1])}, {"logits": reference(mine[:, :-1])}, rtol=1e-5, atol=1e-6)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    loaded = build_model(config, seed=2, device=device)
    dcp.load({"model": loaded.state_dict()}, checkpoint_id=folder)
    return outputs, compare(loaded, reference, rtol=1e-5, atol=1e-6)


def refusals(device: str, dp: int) -> dict[str, str]:
    """Return labkit's refusal of each order under each API; an empty text if it accepts one."""
    said = {}
    for order in (OUTSIDE, INSIDE):
        for fsdp in (1, 2):
            try:
                check_mesh(mesh_of(device, dp, order), fsdp=fsdp)
                said[f"FSDP{fsdp} {order}"] = ""
            except ValueError as error:
                said[f"FSDP{fsdp} {order}"] = str(error)
    return said


# S4.2 ------------------------------------------------------------------------------------------------------------------


def extensions(device: str, dp: int) -> dict[str, tuple[list[str], list[str], str]]:
    """Per model: its FSDP1 units with the 2D extension, those with TP parameters, and the placements of a row-split weight."""
    quiet()
    config = CONFIGS["even"]
    mesh = mesh_of(device, dp)
    line = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    axis = init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=OUTSIDE)["dp"]
    models = {
        "fsdp1 2d": build(config, mesh, "fsdp1_orig"),
        "fsdp1 1d": wrap_fsdp1(build_model(config, device=device), line, orig=True),
        "fsdp1 on an axis without tp": wrap_fsdp1(build_model(config, device=device), axis, orig=True),
        "fsdp2 2d": build(config, mesh, "fsdp2"),
    }
    return {
        name: (
            fsdp1_extended(model),
            fsdp1_over_tp(model),
            str(getattr(model.state_dict()["layers.0.feed_forward.w1.weight"], "placements", "")),
        )
        for name, model in models.items()
    }


# S4.3 ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """Five Adam steps of a 2D model beside the same steps of FSDP over all ranks.

    Attributes:
        gaps: Largest difference between the two models' logits before each step and after the last.
        moved: The change of the logits over the five steps, which has to be large for the comparison to mean anything.
        parameters: The trained parameters of the 2D model against the 1D one's.
    """

    gaps: list[float]
    moved: float
    parameters: Parity


def train_beside_1d(device: str, dp: int, api: Api, config_name: str, dtype: str) -> Training:
    """The ranks of a TP group get the same data in both models, so both average over the same batches."""
    quiet()
    torch.manual_seed(0)
    config, kind = CONFIGS[config_name], getattr(torch, dtype)
    mesh = mesh_of(device, dp)
    line = init_device_mesh(device, (dist.get_world_size(),))
    two = build_model(config, seed=1, device=device).to(kind)
    parallelize_module(two, mesh["tp"], tensor_parallel_plan())
    one = build_model(config, seed=1, device=device).to(kind)
    if api == "fsdp2":
        models = [shard_model(two, mesh["dp"], blocks=Block), shard_model(one, line, blocks=Block)]
    else:
        models = [wrap_fsdp1(m, where, orig=api == "fsdp1_orig") for m, where in ((two, mesh["dp"]), (one, line))]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    probe = batches(config, mesh, 1)[0][0][:, :-1]
    gaps, seen = [], []
    for mine, _ in batches(config, mesh, 5):
        gaps.append(_gap(models, probe, seen))
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, mine)
    gaps.append(_gap(models, probe, seen))
    states = [dict(model.state_dict()) for model in models]
    whole = get_model_state_dict(models[1], options=FULL) if api != "fsdp2" else states[1]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-11}
    parameters = compare(states[0], whole, **tolerance)
    return Training(gaps, float((seen[-1] - seen[0]).abs().max()), parameters)


def _gap(models: list[Any], probe: Tensor, seen: list[Tensor]) -> float:
    with torch.no_grad():
        left, right = (model(probe) for model in models)
    seen.append(left)
    return float((left - right).abs().max())


# S4.4 ------------------------------------------------------------------------------------------------------------------


def sharded_state(device: str, dp: int, api: Api, config_name: str) -> tuple[list[str], Parity, dict[str, tuple[str, str]]]:
    """Keys in order, values against the plain model's, and (placements, axes) per key of the sharded state."""
    quiet()
    config = CONFIGS[config_name]
    plain = build_model(config, seed=1, device=device).state_dict()
    state = dict(build(config, mesh_of(device, dp), api).state_dict())
    layout = {
        name: (str(tuple(value.placements)), str(tuple(value.device_mesh.mesh_dim_names)))
        for name, value in state.items()
        if isinstance(value, DTensor)
    }
    return list(state), compare(state, plain), layout
