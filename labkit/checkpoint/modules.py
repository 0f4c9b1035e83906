"""A module's tensors by canonical FQN, sharded as the module is, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

from labkit.checkpoint.errors import STATE, CheckpointMismatchError
from labkit.checkpoint.names import canonical_fqn, canonical_names


def has_fsdp1(module: nn.Module) -> bool:
    """Whether a module is or holds an old FullyShardedDataParallel wrapper."""
    return any(isinstance(part, FSDP) for part in module.modules())


def module_state(module: nn.Module) -> dict[str, Any]:
    """A module's parameters, persistent buffers and extra state by canonical FQN, sharded as the module is.

    Ranks: collective for FSDP1 (it gathers each unit), else local.
    """
    if has_fsdp1(module):
        _refuse_fsdp1_over_tp(module)
        with sharded_fsdp1(module):
            state = module.state_dict()
    else:
        state = module.state_dict()
    names = canonical_names(list(state), STATE)
    return {names[name]: value for name, value in state.items()}


def is_extra_state(name: str) -> bool:
    """Whether a name in a module's state is that of its extra state, which ``set_extra_state`` takes."""
    return name.rpartition(".")[2] == "_extra_state"


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Hand a sharded state back to a module. Only FSDP1 and extra state need it: other tensors were filled in place.

    Ranks: collective for FSDP1, else local.
    """
    if has_fsdp1(module):
        with sharded_fsdp1(module):
            names = {canonical_fqn(name): name for name in module.state_dict()}
            module.load_state_dict({names[name]: value for name, value in state.items()})
        return
    extra = {name: value for name, value in state.items() if is_extra_state(name)}
    for name, value in extra.items():
        owner = name.rpartition(".")[0]
        {canonical_fqn(path + ".x").rpartition(".")[0]: part for path, part in module.named_modules()}[owner].set_extra_state(value)


def sharded_fsdp1(module: nn.Module) -> Any:
    """A context in which an FSDP1 module hands out and takes sharded state."""
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
