"""An optimizer's state by parameter name.

Reading never changes the optimizer. torch's ``get_optimizer_state_dict`` runs a step on a fresh optimizer, and in places matches
moments by position. Here each parameter's state is read from the optimizer and named by the module's FQN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from labkit.checkpoint.errors import STATE, CheckpointMismatchError, FQNMismatchError
from labkit.checkpoint.index.model import Path_
from labkit.checkpoint.index.names import flat_key, fqn_of
from labkit.checkpoint.state.modules import has_fsdp1, sharded_fsdp1


def parameter_names(optimizer: Optimizer, modules: Mapping[Path_, nn.Module]) -> dict[int, str]:
    """Return the FQN of each of an optimizer's parameters, by ``id``.

    Raises:
        FQNMismatchError: A parameter belongs to none of the modules.

    Ranks: local.
    """
    names: dict[int, str] = {}
    for path, module in modules.items():
        prefix = f"{flat_key(path)}." if len(modules) > 1 else ""
        fqn = fqn_of(module)
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), prefix + fqn(name))
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:4])
        raise FQNMismatchError(
            STATE,
            unexpected=[
                f"{len(strangers)} tensors in the optimizer (shapes {shapes}) that are parameters of no module in the state"
            ],
            advice="Build the optimizer after fully_shard, and put the module that it trains into the state too. An optimizer "
            "built "
            "before holds the old parameters, and its steps change nothing.",
        )
    return names


def optimizer_state(optimizer: Optimizer, modules: Mapping[Path_, nn.Module]) -> dict[str, Any]:
    """Return an optimizer's state by FQN: ``{"state": {fqn: {...}}, "param_groups": [{..., "params": [fqn, ...]}]}``.

    Nothing is initialised or changed: a fresh optimizer has an empty ``state``. The form is that of
    :func:`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, whose counterpart can load it.

    Ranks: collective for FSDP1 (:meth:`FSDP.optim_state_dict`), else local.
    """
    old = [module for module in modules.values() if has_fsdp1(module)]
    if old:
        if len(modules) > 1:
            raise CheckpointMismatchError(STATE, ["an FSDP1 module beside another module: give each its own state and save call"])
        with sharded_fsdp1(old[0]):
            state = FSDP.optim_state_dict(old[0], optimizer)
        fqn = fqn_of(old[0])
        return {
            "state": {fqn(name): value for name, value in state["state"].items()},
            "param_groups": [{**group, "params": [fqn(name) for name in group["params"]]} for group in state["param_groups"]],
        }
    names = parameter_names(optimizer, modules)
    states = {names[id(parameter)]: dict(value) for parameter, value in optimizer.state.items() if value}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": states, "param_groups": groups}


def match_groups(optimizer: Optimizer, names: Mapping[int, str], saved: list[dict[str, Any]], path: object) -> list[dict[str, Any]]:
    """Return the saved group for each of an optimizer's groups, matched by parameters, or by order if empty.

    Raises:
        FQNMismatchError: Parameters are missing or unexpected, or the groups divide them differently.
    """
    ours = [frozenset(names[id(p)] for p in group["params"]) for group in optimizer.param_groups]
    theirs = [frozenset(group["params"]) for group in saved]
    all_ours, all_theirs = frozenset().union(*ours), frozenset().union(*theirs)
    if all_ours != all_theirs:
        raise FQNMismatchError(
            path,
            missing=[f"optimizer group entry of {name}" for name in sorted(all_ours - all_theirs)],
            unexpected=[f"optimizer group entry of {name}" for name in sorted(all_theirs - all_ours)],
        )
    if sorted(map(sorted, ours)) != sorted(map(sorted, theirs)):
        raise FQNMismatchError(
            path,
            unexpected=[
                f"{len(theirs)} parameter groups that divide the parameters in another way than the optimizer's {len(ours)}"
            ],
            advice="Build the optimizer with the groups it was saved with.",
        )
    left = list(zip(theirs, saved, strict=True))
    matched = []
    for wanted in ours:
        index = next(i for i, (params, _) in enumerate(left) if params == wanted)
        matched.append(left.pop(index)[1])
    return matched


def state_like(
    parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str, group: Mapping[str, Any]
) -> torch.Tensor:
    """Allocate an uninitialised tensor for one piece of a parameter's optimizer state.

    A piece with the parameter's shape is sharded like the parameter; anything else is whole on every rank. A step counter is on the
    CPU unless the optimizer is capturable or fused.
    """
    if shape == tuple(parameter.shape) and (shape or name != "step"):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)
    on_device = name != "step" or group.get("capturable") or group.get("fused")
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    return torch.empty(shape, dtype=dtype, device=device if on_device else "cpu")
