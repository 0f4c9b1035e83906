"""From a training state (modules, optimizers, schedulers, tensors, values) to flat leaves and back.

Reading never changes what is read: torch's ``get_optimizer_state_dict`` runs an optimizer step on a fresh optimizer and
sorts moments by position in places; here a parameter's state is read off the optimizer and named by the module's FQN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from labkit.checkpoint.dcp_writer import Leaf
from labkit.checkpoint.errors import CheckpointMismatchError, FQNMismatchError
from labkit.checkpoint.model import Path_
from labkit.checkpoint.names import canonical_fqn, canonical_names
from labkit.checkpoint.shards import is_tensor, local_tensor

STATE = "the state"


@dataclass
class PerRank:
    """A value that each rank has its own of: saved under ``rank_0``, ``rank_1`` ..., loaded by the rank it belongs to.

    Attributes:
        value: Plain data, tensors, nested dicts of them, or an object with ``state_dict`` and ``load_state_dict``.
    """

    value: Any


class Rng:
    """This process's random number generators as state: Python's, torch's on the CPU and every visible GPU, numpy's.

    Wrap it in :class:`PerRank`, since every rank has its own: ``{"rng": PerRank(Rng())}``. numpy is included when it is loaded.

    Ranks: local.
    """

    def state_dict(self) -> dict[str, Any]:
        """The generators' states, as tensors and plain data."""
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate())}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = {str(index): torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())}
        numpy = _numpy_random()
        if numpy is not None:
            name, keys, *rest = numpy.get_state()
            state["numpy"] = [name, keys.tolist(), *rest]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators to a state from :meth:`state_dict`. GPUs that this process does not have are left out."""
        torch.set_rng_state(state["torch"])
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        if torch.cuda.is_available():
            for index, value in state.get("cuda", {}).items():
                if int(index) < torch.cuda.device_count():
                    torch.cuda.set_rng_state(value, int(index))
        numpy = _numpy_random()
        if numpy is not None and "numpy" in state:
            numpy.set_state(tuple(state["numpy"]))


def _numpy_random() -> Any:
    import sys

    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


@dataclass
class Captured:
    """A training state taken apart.

    Attributes:
        leaves: This rank's values by flat key; tensors share memory with the live ones where they can.
        modules: Key prefix to module.
        optimizers: Key prefix to optimizer.
        objects: Key prefix to other objects with ``state_dict`` and ``load_state_dict``.
        values: Paths of leaves that are no tensors and no part of an object, to be replaced on load.
        per_rank: Key prefixes of :class:`PerRank` values, without the rank.
        replicas: Flat key to the label under which ranks must hold equal values; see :class:`labkit.checkpoint.shards.LocalTensor`.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    modules: dict[Path_, nn.Module] = field(default_factory=dict)
    optimizers: dict[Path_, Optimizer] = field(default_factory=dict)
    objects: dict[Path_, Any] = field(default_factory=dict)
    values: list[Path_] = field(default_factory=list)
    per_rank: list[Path_] = field(default_factory=list)
    replicas: dict[str, str] = field(default_factory=dict)


def flat_key(path: Path_) -> str:
    """Nested keys as DCP flattens them."""
    return ".".join(map(str, path))


def capture(state: Mapping[str, Any], rank: int, *, optimizers: bool = True) -> Captured:
    """Take a training state apart.

    Args:
        state: Nested dicts whose leaves are tensors of any kind, plain values, :class:`PerRank`, modules, optimizers, or
            objects with ``state_dict`` and ``load_state_dict`` (schedulers, data loaders).
        rank: This rank, for per-rank values.
        optimizers: Whether to read the optimizers' state, or only to note where they are.

    Raises:
        FQNMismatchError: Two leaves get one name; or an optimizer holds tensors that are no parameter of any module in
            the state (it was built before ``fully_shard`` replaced them, and its steps change nothing).
        CheckpointMismatchError: A tensor cannot be saved (meta, sparse, an unreduced sum), or FSDP1 is combined with
            tensor parallelism, whose optimizer state torch restores wrongly.

    Ranks: collective when an FSDP1 module is in the state, else local.
    """
    found = Captured()
    plain: list[tuple[Path_, Any, bool]] = []
    _sort(state, (), found, plain, rank, own=False)
    for path, module in found.modules.items():
        for name, value in module_state(module).items():
            _add(found, (*path, name), value, own=False)
    if optimizers:
        for path, optimizer in found.optimizers.items():
            for sub, value in walk(optimizer_state(optimizer, found.modules)):
                _add(found, (*path, *sub), value, own=False)
    for path, value, own in plain:
        _add(found, path, value, own=own)
    return found


def _sort(value: Any, path: Path_, found: Captured, plain: list[tuple[Path_, Any, bool]], rank: int, *, own: bool) -> None:
    if isinstance(value, PerRank):
        found.per_rank.append(path)
        _sort(value.value, (*path, f"rank_{rank}"), found, plain, rank, own=True)
    elif isinstance(value, nn.Module):
        found.modules[path] = value
    elif isinstance(value, Optimizer):
        found.optimizers[path] = value
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            _sort(item, (*path, str(key)), found, plain, rank, own=own)
    elif not is_tensor(value) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        found.objects[path] = value
        plain.extend(((*path, *sub), leaf, own) for sub, leaf in walk(value.state_dict()))
    else:
        for sub, leaf in walk(value):
            plain.append(((*path, *sub), leaf, own))
            if not is_tensor(leaf):
                found.values.append((*path, *sub))


def walk(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """The leaves of nested dicts and lists as DCP flattens them: a list is one leaf unless it holds a tensor or a dict."""
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from walk(item, (*path, str(key)))
    elif isinstance(value, list) and _holds_tensors(value):
        for index, item in enumerate(value):
            yield from walk(item, (*path, index))
    else:
        yield path, value


def _holds_tensors(items: Any) -> bool:
    return any(is_tensor(item) or isinstance(item, Mapping) or (isinstance(item, list) and _holds_tensors(item)) for item in items)


def _add(found: Captured, path: Path_, value: Any, *, own: bool) -> None:
    key = flat_key(path)
    if key in found.leaves:
        raise FQNMismatchError(STATE, unexpected=[f"{key} comes from two places"], advice="Rename one of them.")
    if not is_tensor(value):
        found.leaves[key] = Leaf(key, path, value=value, own=own)
        return
    local = local_tensor(value)
    shards = tuple((shard.offsets, shard.sizes, shard.data) for shard in local.shards)
    found.leaves[key] = Leaf(key, path, local.shape, local.dtype, shards, own=own)
    if local.replica_of is not None and not own:
        found.replicas[key] = local.replica_of


# -- modules ---------------------------------------------------------------------------------------------------------


def has_fsdp1(module: nn.Module) -> bool:
    """Whether a module is or holds an old FullyShardedDataParallel wrapper."""
    return any(isinstance(part, FSDP) for part in module.modules())


def module_state(module: nn.Module) -> dict[str, Any]:
    """A module's parameters, persistent buffers and extra state by canonical FQN, sharded as the module is.

    Ranks: collective for FSDP1 (it gathers each unit), else local.
    """
    if has_fsdp1(module):
        _refuse_fsdp1_over_tp(module)
        with _sharded_fsdp1(module):
            state = module.state_dict()
    else:
        state = module.state_dict()
    names = canonical_names(list(state), STATE)
    return {names[name]: value for name, value in state.items()}


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Hand a sharded state back to a module. Only FSDP1 and extra state need it: other tensors were filled in place.

    Ranks: collective for FSDP1, else local.
    """
    if has_fsdp1(module):
        with _sharded_fsdp1(module):
            names = {canonical_fqn(name): name for name in module.state_dict()}
            module.load_state_dict({names[name]: value for name, value in state.items()})
        return
    extra = {name: value for name, value in state.items() if name.split(".")[-1] == "_extra_state"}
    for name, value in extra.items():
        owner = name.rpartition(".")[0]
        {canonical_fqn(path + ".x").rpartition(".")[0]: part for path, part in module.named_modules()}[owner].set_extra_state(value)


def _sharded_fsdp1(module: nn.Module) -> Any:
    # Never offload_to_cpu here: on a CPU module torch 2.11 to 2.13 crash with it or hand out shared buffers.
    return FSDP.state_dict_type(
        module,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


def _refuse_fsdp1_over_tp(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDP) and getattr(part, "_fsdp_extension", None) is not None:
            raise CheckpointMismatchError(
                STATE,
                [
                    "FSDP1 is combined with tensor parallelism: torch saves wrong weights when the mesh axes are swapped, and "
                    "restores "
                    "wrong Adam moments of row-parallel weights in any order"
                ],
                advice="Use fully_shard (FSDP2) over the tensor-parallel model.",
            )


# -- optimizers ------------------------------------------------------------------------------------------------------


def parameter_names(optimizer: Optimizer, modules: Mapping[Path_, nn.Module]) -> dict[int, str]:
    """The FQN of each of an optimizer's parameters, by ``id``.

    Raises:
        FQNMismatchError: A parameter belongs to none of the modules.

    Ranks: local.
    """
    names: dict[int, str] = {}
    for path, module in modules.items():
        prefix = f"{flat_key(path)}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), prefix + canonical_fqn(name))
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
    """An optimizer's state by FQN: ``{"state": {fqn: {...}}, "param_groups": [{..., "params": [fqn, ...]}]}``.

    Nothing is initialised and nothing changes: a fresh optimizer has an empty ``state``. The form is that of
    :func:`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, which loads it.

    Ranks: collective for FSDP1 (:meth:`FSDP.optim_state_dict`), else local.
    """
    old = [module for module in modules.values() if has_fsdp1(module)]
    if old:
        if len(modules) > 1:
            raise CheckpointMismatchError(STATE, ["an FSDP1 module beside another module: give each its own state and save call"])
        with _sharded_fsdp1(old[0]):
            state = FSDP.optim_state_dict(old[0], optimizer)
        return {
            "state": {canonical_fqn(name): value for name, value in state["state"].items()},
            "param_groups": _canonical_groups(state),
        }
    names = parameter_names(optimizer, modules)
    states = {names[id(parameter)]: dict(value) for parameter, value in optimizer.state.items() if value}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": states, "param_groups": groups}


def _canonical_groups(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**group, "params": [canonical_fqn(name) for name in group["params"]]} for group in state["param_groups"]]


def match_groups(optimizer: Optimizer, names: Mapping[int, str], saved: list[dict[str, Any]], path: object) -> list[dict[str, Any]]:
    """The saved group for each of an optimizer's groups, matched by the parameters in it; empty groups by their order.

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
    """An uninitialised tensor for one piece of a parameter's optimizer state.

    A piece with the parameter's shape is sharded as the parameter is; anything else (a step counter) is whole on every
    rank, on the CPU unless the optimizer is capturable or fused.
    """
    if shape == tuple(parameter.shape) and (shape or name != "step"):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)
    on_device = name != "step" or group.get("capturable") or group.get("fused")
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    return torch.empty(shape, dtype=dtype, device=device if on_device else "cpu")
