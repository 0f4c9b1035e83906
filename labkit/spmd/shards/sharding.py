"""Sharding of a model with FSDP2 by a policy, from the inside out, with checks for cases that torch accepts but gets wrong.

FSDP1 took an ``auto_wrap_policy``; `fully_shard` takes one module at a time and leaves the order to the caller. This module
provides the loop over the modules, after some checks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from labkit.errors import LabkitError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_CHECKSUM_PIECE = 1 << 24
Blocks = type[nn.Module] | Collection[type[nn.Module]] | Callable[[nn.Module], bool]


class ShardingError(LabkitError, ValueError):
    """The model cannot be sharded as asked; it has not been changed."""


def shard_model(
    model: ModuleT,
    mesh: DeviceMesh,
    *,
    blocks: Blocks,
    reshard_after_forward: bool | int | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> ModuleT:
    """Apply `fully_shard` to each matching module, innermost first, and then to the model itself.

    FSDP1's ``auto_wrap_policy=ModuleWrapPolicy({Block})`` is now ``blocks=Block``. Matching modules that share a parameter (tied
    weights) form one group.

    Args:
        model: A whole or already tensor-parallel module, with the same values on every rank of ``mesh``. Changed in place.
        mesh: One axis to shard over, or two to replicate and shard over (HSDP).
        blocks: A module class, several classes, or a predicate. The model itself is always sharded last and need not match.
        reshard_after_forward: As in `fully_shard`, but only for the blocks. The root keeps torch's default: its parameters stay
            whole after forward, because backward needs them first.
        ignored_params: Parameters that stay plain. Their gradients are not averaged.
        mp_policy: As in `fully_shard`.
        offload_policy: As in `fully_shard`.

    Returns:
        The model.

    Raises:
        ShardingError: Nothing matches ``blocks``; a container without ``forward`` matches; a part of the model is already
            sharded; a tied parameter belongs to a matching module and to another one; an ignored parameter is not the model's;
            an optimizer already holds parameters that sharding replaces (it would go on updating unused tensors); or the ranks hold
            different values (FSDP2 does not broadcast, so each rank would keep a part of a different model).

    Ranks: collective. All checks run before the model is changed, and the ranks agree on whether values differ.
    Blocks: for one all-reduce of a checksum per parameter.
    """
    ignored = set(ignored_params)
    names = {module: name for name, module in model.named_modules()}
    matched = [module for module in names if module is not model and _matches(module, blocks)]
    _check_modules(names, matched)
    groups = _tied_groups(model, matched, ignored)
    _check_parameters(model, ignored)
    _check_optimizers(model, ignored)
    _check_same_values(model, mesh, ignored)
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload_policy or OffloadPolicy(),
        ignored_params=ignored,
    )
    for group in groups:
        shard(group[0] if len(group) == 1 else group, reshard_after_forward=reshard_after_forward)
    shard(model)
    return model


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that updates tensors other than the model's parameters.

    Such an optimizer was built for another model, or before this one was sharded, and its ``step`` would silently do nothing.

    Raises:
        ShardingError: The optimizer holds such tensors; the message gives their number.

    Ranks: local.
    """
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stray = sum(id(parameter) not in own for parameter in held)
    if stray:
        raise ShardingError(
            f"{stray} of the {len(held)} tensors in {type(optimizer).__name__} are not parameters of the model, so its steps would "
            "change nothing. Build the optimizer after sharding, from model.parameters()."
        )


def _matches(module: nn.Module, blocks: Blocks) -> bool:
    if isinstance(blocks, type):
        return isinstance(module, blocks)
    if callable(blocks):
        return blocks(module)
    return isinstance(module, tuple(blocks))


def _check_modules(names: dict[nn.Module, str], matched: list[nn.Module]) -> None:
    sharded = [name or "the model itself" for module, name in names.items() if isinstance(module, FSDPModule)]
    if sharded:
        raise ShardingError(f"already sharded: {_listed(sharded)}. Start from a whole model.")
    if not matched:
        kinds = sorted({type(module).__name__ for module, name in names.items() if name})
        raise ShardingError(
            f"no module matches `blocks`. With only the root sharded there is one group: the whole model is gathered at once and "
            f"nothing overlaps. Module classes here: {_listed(kinds)}."
        )
    containers = [names[module] for module in matched if type(module).forward is nn.Module.forward]
    if containers:
        raise ShardingError(
            f"`blocks` matches containers, which have no forward to gather for: {_listed(containers)}. Match the modules inside."
        )


def _tied_groups(model: nn.Module, matched: list[nn.Module], ignored: set[nn.Parameter]) -> list[list[nn.Module]]:
    """Return matched modules in the order to shard them, innermost first; modules that share a parameter form one group."""
    owners: dict[nn.Parameter, dict[nn.Module, str]] = {}
    depth = {module: name.count(".") for name, module in model.named_modules()}
    inside = {module: set(module.modules()) for module in matched}
    for prefix, module in model.named_modules():
        enclosing = [block for block in matched if module in inside[block]]
        group = max(enclosing, key=depth.__getitem__, default=model)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in ignored:
                owners.setdefault(parameter, {})[group] = f"{prefix}.{name}".lstrip(".")
    group_of = {module: [module] for module in matched}
    for shared in owners.values():
        if len(shared) == 1:
            continue
        if model in shared:
            raise ShardingError(
                f"{' and '.join(shared.values())} are one tied parameter, but `blocks` matches only some of the modules that use "
                "it. Match all of them (they become one group) or none (the root's group takes it)."
            )
        merged = [module for module in matched if any(module in group_of[owner] for owner in shared)]
        for module in merged:
            group_of[module] = merged
    groups = {id(group): group for group in group_of.values()}
    return sorted(groups.values(), key=lambda group: -max(depth[module] for module in group))


def _check_parameters(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    strangers = len(ignored - set(model.parameters()))
    if strangers:
        raise ShardingError(
            f"{strangers} of the {len(ignored)} ignored parameters are not in this model; ignoring them does nothing."
        )


def _check_optimizers(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    replaced = {id(parameter) for parameter in model.parameters() if parameter not in ignored}
    if not _holders(replaced):
        return
    gc.collect()  # a deleted optimizer may not have been collected yet
    for name, held in _holders(replaced):
        raise ShardingError(
            f"{name} already holds {held} parameters of this model. Sharding replaces them, and the optimizer would go on to "
            "update the old ones: no error, no training. Shard first, then build the optimizer."
        )


def _holders(parameter_ids: set[int]) -> list[tuple[str, int]]:
    """Return, for each live optimizer with any of these parameters, its class name and how many it holds; torch keeps no list."""
    found = []
    for candidate in gc.get_objects():
        # Use type(), because isinstance() would run code of lazy proxy objects.
        if issubclass(type(candidate), torch.optim.Optimizer):
            groups = getattr(candidate, "param_groups", [])  # the attribute is missing while __init__ still runs
            held = sum(id(parameter) in parameter_ids for group in groups for parameter in group["params"])
            if held:
                found.append((type(candidate).__name__, held))
    return found


def _check_same_values(model: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    named = [(name, p) for name, p in model.named_parameters() if p not in ignored and not p.is_meta]
    if not named:
        return
    sums = torch.stack([_checksum(parameter).cpu() for _, parameter in named]).to(mesh.device_type)
    extremes = torch.stack([sums, -sums])
    for axis in range(mesh.ndim):
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    differ = (extremes[0] != -extremes[1]).tolist()
    differing = [name for (name, _), flag in zip(named, differ, strict=True) if flag]
    if differing:
        raise ShardingError(
            f"the ranks hold different values of {_listed(differing)}. fully_shard does not broadcast: the sharded model would be "
            "stitched together from different ones. Initialise all ranks from one seed, or load one state on all of them."
        )


@torch.no_grad()
def _checksum(parameter: Tensor) -> Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    raw = local.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    # Weight each byte by its position, modulo 2**64, so that order matters too. Working in pieces bounds the memory.
    for start, piece in enumerate(raw.split(_CHECKSUM_PIECE)):
        weights = torch.arange(1, piece.numel() + 1, device=raw.device, dtype=torch.int64) + start * _CHECKSUM_PIECE
        total += (piece.to(torch.int64) * weights).sum()
    return total


def _listed(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
