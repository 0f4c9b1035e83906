"""The ranks' side of the seed rows S4.5 to S4.7; run on gloo by tests/process and on NCCL by tests/gpu."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.transformer import Block, ModelConfig
from labkit.spmd.shards.meshes import restore_optimizer, shard_2d
from labkit.spmd.shards.parity import compare
from labkit.spmd.shards.records import Parity
from labkit.spmd.shards.sharding import shard_model
from labkit.spmd.shards.tensor_parallel import tensor_parallel_plan
from labkit.spmd.trace.reshard_trace import SavedTensor, trace_input_reshard
from tests.process.s4_scenarios import CONFIGS, FULL, Api, batches, build, mesh_of, quiet, step, wrap_fsdp1

# S4.5 ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Return:
    """A save, a step and a load.

    Attributes:
        moved: The stepped model against the saved state: it has to differ.
        values: The loaded state against the saved one.
        layout: Whether local tensors, mesh and placements of the loaded state are those of the saved one, key by key.
    """

    moved: Parity
    values: Parity
    layout: bool


def save_train_load(device: str, dp: int, api: Api, config_name: str, way: Literal["torch.save", "dcp"], folder: str) -> Return:
    """Save the sharded state to a file, train a step, and load the state."""
    quiet()
    config = CONFIGS[config_name]
    mesh = mesh_of(device, dp)
    model = build(config, mesh, api)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    saved = copy.deepcopy(dict(model.state_dict()))
    file = io.BytesIO()
    if way == "torch.save":
        torch.save(dict(model.state_dict()), file)
    else:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    step(model, optimizer, batches(config, mesh, 1)[0][0])
    moved = compare(dict(model.state_dict()), saved)
    if way == "torch.save":
        file.seek(0)
        state = torch.load(file, weights_only=True)
    else:
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=folder)
    model.load_state_dict(state)
    loaded = dict(model.state_dict())
    same = [_same_layout(loaded[name], saved[name]) for name in saved]
    return Return(moved, compare(loaded, saved), all(same))


def _same_layout(left: Tensor, right: Tensor) -> bool:
    if not isinstance(left, DTensor) or not isinstance(right, DTensor):
        return type(left) is type(right) and torch.equal(left, right)
    same_local = torch.equal(left.to_local(), right.to_local())
    return same_local and left.device_mesh == right.device_mesh and left.placements == right.placements


def targets(device: str) -> dict[str, Any]:
    """A mesh for every layout that this number of ranks allows, by name."""
    world_size = dist.get_world_size()
    shapes = [(world_size // tp, tp) for tp in (1, 2, 4) if world_size % tp == 0]
    made: dict[str, Any] = {}
    for dp, tp in shapes:
        made[f"dp{dp} tp{tp}"] = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))
    if world_size == 4:
        made["replicate2 dp2 tp1"] = init_device_mesh(device, (2, 2, 1), mesh_dim_names=("replicate", "dp", "tp"))
        made["replicate2 dp1 tp2"] = init_device_mesh(device, (2, 1, 2), mesh_dim_names=("replicate", "dp", "tp"))
    return made


WIDE = ModelConfig(vocab_size=251, dim=24, num_layers=1, num_heads=4, hidden_dim=60, max_seq_len=16)


def reshape(device: str, source_name: str, folder: str) -> dict[str, tuple[Parity, Parity]]:
    """Save from one layout with Adam's state, load into every layout: model and moments against the saved ones."""
    quiet()
    meshes, found = targets(device), {}
    source = shard_2d(build_model(WIDE, seed=1, device=device), meshes[source_name], tensor_parallel_plan(), blocks=Block)
    optimizer = torch.optim.Adam(source.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    step(source, optimizer, torch.randint(251, (2, 13), generator=generator).to(device))
    moments = get_optimizer_state_dict(source, optimizer)
    dcp.save({"model": get_model_state_dict(source), "optimizer": moments}, checkpoint_id=folder)
    for name, mesh in meshes.items():
        target = shard_2d(build_model(WIDE, seed=2, device=device), mesh, tensor_parallel_plan(), blocks=Block)
        fresh = torch.optim.Adam(target.parameters(), lr=1e-2)
        state = {"model": get_model_state_dict(target), "optimizer": get_optimizer_state_dict(target, fresh)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(target, state["model"])
        restore_optimizer(target, fresh, state["optimizer"])
        loaded = compare(get_optimizer_state_dict(target, fresh)["state"], moments["state"])
        found[name] = compare(target, source), loaded
    return found


# S4.6 ------------------------------------------------------------------------------------------------------------------


def optimizer_round_trip(device: str, dp: int, api: Api, config_name: str, options: Mapping[str, bool]) -> tuple[Parity, Parity]:
    """Read Adam's state of a 2D model, take a step, restore the state. Return what had changed and what was restored."""
    quiet()
    config = CONFIGS[config_name]
    mesh = mesh_of(device, dp)
    model = build(config, mesh, api)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    (first, _), (second, _) = batches(config, mesh, 2)
    step(model, optimizer, first)
    read = StateDictOptions(**{name: value for name, value in options.items() if name != "broadcast_from_rank0"})
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=read))
    truth = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    step(model, optimizer, second)
    moved = compare(get_optimizer_state_dict(model, optimizer)["state"], truth["state"])
    set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(**options))
    return moved, compare(get_optimizer_state_dict(model, optimizer)["state"], truth["state"])


def first_half_twice(device: str, dp: int) -> tuple[bool, bool]:
    """T36 in detail: return whether the second TP half of a row-split moment became the first half, and whether it is right."""
    quiet()
    config = CONFIGS["even"]
    mesh = mesh_of(device, dp)
    model = build(config, mesh, "fsdp1_orig")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step(model, optimizer, batches(config, mesh, 1)[0][0])
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved))
    name = "layers.0.feed_forward.w1.weight"
    before, after = (state["state"][name]["exp_avg"].full_tensor() for state in (saved, get_optimizer_state_dict(model, optimizer)))
    half = len(before) // 2
    return torch.equal(after[half:], before[:half]), torch.equal(after[half:], before[half:])


def refused_restore(device: str, dp: int) -> tuple[str, Parity]:
    """Return labkit's refusal of FSDP1 over TP, and the comparison of the refused state as loaded under FSDP2."""
    quiet()
    config = CONFIGS["even"]
    mesh = mesh_of(device, dp)
    models = [build(config, mesh, api) for api in ("fsdp1_orig", "fsdp2")]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, batches(config, mesh, 1)[0][0])
    saved = copy.deepcopy(get_optimizer_state_dict(models[0], optimizers[0]))
    text = ""
    try:
        restore_optimizer(models[0], optimizers[0], saved)
    except ValueError as error:
        text = str(error)
    with torch.no_grad():
        for state in optimizers[1].state.values():
            state["exp_avg"].zero_()
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in _flat(saved).items()}
    restore_optimizer(models[1], optimizers[1], _nested(saved, full), options=FULL)
    after = get_optimizer_state_dict(models[1], optimizers[1])
    return text, compare(after["state"], saved["state"])


def _flat(state: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {(name, key): value for name, values in state["state"].items() for key, value in values.items()}


def _nested(state: dict[str, Any], values: dict[tuple[str, str], Any]) -> dict[str, Any]:
    nested: dict[str, dict[str, Any]] = {}
    for (name, key), value in values.items():
        nested.setdefault(name, {})[key] = value
    return {"state": nested, "param_groups": state["param_groups"]}


# S4.7 ------------------------------------------------------------------------------------------------------------------

Reshard = Literal["off", "whole model", "whole model, placements kept", "column-parallel layers"]


class Chain(nn.Module):
    """Linear layers with ReLU between them: the seed's model in its own sizes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.net = nn.ModuleList(nn.Linear(first, second) for first, second in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = torch.relu(layer(x))
        return x


def reshard_gradients(device: str, dp: int, how: Reshard, fsdp: Literal[0, 1, 2]) -> Parity:
    """Gradients of the seed's plan with the saved tensors spread over the TP ranks, against the plain model's."""
    quiet()
    mesh = mesh_of(device, dp)
    torch.manual_seed(0)
    plain = Chain(5, 8, 4, 12).to(device)
    model: nn.Module = copy.deepcopy(plain)
    keep = how == "whole model, placements kept"
    plan: dict[str, ParallelStyle] = {"net.0": ColwiseParallel(use_local_output=not keep), "net.1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    if how == "column-parallel layers":
        input_reshard(model.net[0], mesh["tp"], 0)  # type: ignore[index]
    if fsdp == 2:
        model = shard_model(model, mesh["dp"], blocks=nn.Linear)
    elif fsdp == 1:
        model = wrap_fsdp1(model, mesh["dp"], orig=True)
    if how.startswith("whole model"):
        model = input_reshard(model, mesh["tp"], 0)
    x = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: tensor.detach().clone() for name, tensor in plain.named_parameters()}
    plain(x).sum().backward()
    model(x).sum().backward()
    optimizer.step()
    # The step by the gradient itself: FSDP1 shows its gradients as flat pieces only.
    after = dict(model.state_dict())
    wanted = {name: before[name] - tensor.grad for name, tensor in plain.named_parameters()}
    return compare(after, wanted, rtol=1e-4, atol=1e-5)


def saved_tensors(device: str, dp: int) -> list[SavedTensor]:
    """Return the tensors that ``input_reshard`` keeps under the seed's plan."""
    quiet()
    mesh = mesh_of(device, dp)
    torch.manual_seed(0)
    model = Chain(5, 8, 4, 12).to(device)
    parallelize_module(model, mesh["tp"], {"net.0": ColwiseParallel(), "net.1": RowwiseParallel()})
    with trace_input_reshard(model, mesh["tp"], modules=[model]) as trace:
        model(torch.rand(4, 5, generator=torch.Generator().manual_seed(1)).to(device))
    return trace.saved


def kept_bytes(device: str, dp: int) -> dict[Reshard, int]:
    """Return the bytes that a rank keeps for backward of a wide chain, for each place of ``input_reshard``."""
    quiet()
    mesh = mesh_of(device, dp)
    found: dict[Reshard, int] = {}
    wheres: dict[Reshard, Any] = {
        "off": lambda model: [],
        "whole model": lambda model: [model],
        "whole model, placements kept": lambda model: [model],
        "column-parallel layers": lambda model: [model.net[0]],
    }
    for how, where in wheres.items():
        model = Chain(64, 256, 64, 64).to(device)
        keep = how == "whole model, placements kept"
        plan: dict[str, ParallelStyle] = {"net.0": ColwiseParallel(use_local_output=not keep), "net.1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        with trace_input_reshard(model, mesh["tp"], modules=where(model)) as trace:
            model(torch.rand(32, 64).to(device))
        found[how] = trace.kept_bytes
    return found
