"""A module's tensors by canonical FQN, sharded like the module, and their loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor

from labkit.checkpoint.errors import STATE, CheckpointMismatchError
from labkit.checkpoint.files.plain_tensors import is_wrapper
from labkit.checkpoint.index.names import check_unique, fqn_of
from labkit.checkpoint.state.shards import is_sharded, is_tensor


def has_fsdp1(module: nn.Module) -> bool:
    """Return whether a module is or contains an FSDP1 wrapper (FullyShardedDataParallel)."""
    return any(isinstance(part, FSDP) for part in module.modules())


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's parameters, persistent buffers and extra state by canonical FQN, sharded like the module.

    Ranks: collective for FSDP1 (it gathers each unit), else local.
    """
    if has_fsdp1(module):
        _refuse_fsdp1_over_tp(module)
        with sharded_fsdp1(module):
            state = module.state_dict()
    else:
        state = module.state_dict()
    fqn = fqn_of(module)
    names = {name: fqn(name) for name in state}
    check_unique(names, STATE)
    return {names[name]: value for name, value in state.items()}


def not_handed_back(module: nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in a module's state that a load cannot restore, each with the reason.

    A load fills the module's own tensors and calls ``set_extra_state``. It cannot restore a copy of a tensor, or a value that
    ``state_dict`` adds. FSDP1 modules can load everything they return.

    Ranks: local.
    """
    if has_fsdp1(module):
        return {}
    live = {_memory(tensor) for tensor in (*module.parameters(), *module.buffers())}
    reasons = {}
    for name, value in state.items():
        if is_extra_state(name):
            if is_sharded(value):
                reasons[name] = "is a sharded tensor, which set_extra_state would get whole; make it a buffer"
        elif not is_tensor(value):
            reasons[name] = f"is of type {type(value).__name__}, which a load can restore only if get_extra_state returns it"
        elif _memory(value) not in live:
            reasons[name] = "is not a parameter or buffer of the module but a copy, which no load can restore; see get_extra_state"
    return reasons


def _memory(tensor: Any) -> int:
    """Return the address of a tensor's data in memory; 0 if the tensor has no memory of its own."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    plain = not isinstance(local, ShardedTensor) and local.layout is torch.strided and not is_wrapper(local)
    return local.untyped_storage().data_ptr() if plain else 0


def is_extra_state(name: str) -> bool:
    """Return whether a name in a module's state is for extra state, which ``set_extra_state`` takes."""
    return name.rpartition(".")[2] == "_extra_state"


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a sharded state into a module. Only FSDP1 and extra state need this: other tensors were filled in place.

    Ranks: collective for FSDP1, else local.
    """
    if has_fsdp1(module):
        with sharded_fsdp1(module):
            fqn = fqn_of(module)
            names = {fqn(name): name for name in module.state_dict()}
            module.load_state_dict({names[name]: value for name, value in state.items()})
        return
    extra = {name: value for name, value in state.items() if is_extra_state(name)}
    fqn = fqn_of(module)
    for name, value in extra.items():
        owner = name.rpartition(".")[0]
        {fqn(path + ".x").rpartition(".")[0]: part for path, part in module.named_modules()}[owner].set_extra_state(value)


def sharded_fsdp1(module: nn.Module) -> Any:
    """Return a context manager in which an FSDP1 module returns and loads sharded state."""
    # Never offload_to_cpu here: with it, torch 2.11 to 2.13 crash on a CPU module or return shared buffers.
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
