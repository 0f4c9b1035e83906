"""Reset of torch's data-parallel wrappers (FSDP2, FSDP1, DDP): the only module that touches their private state.

A forward or backward that was cut off leaves them half way: gathered parameters, states that say "in backward", pending collectives
of aborted groups, partial gradients. The functions here return a wrapper to its state between two iterations. A forward or backward
never touches the sharded parameters themselves, so they are bit for bit those of the last completed optimizer step.

Torch offers this for FSDP2 only, and only since 2.13 (``FSDPModule.reset_iter_state``). That call first waits for pending
collectives, which would raise after an abort, and it keeps unsharded gradients. The manual steps here are valid for 2.11 to 2.15;
the public call follows if it exists. :mod:`labkit.worker.mend.self_test` checks the assumptions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

FSDP2_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
DDP = "torch.nn.parallel.distributed"


def loaded_class(module: str, name: str) -> Any:
    """Return a class that user code may have instances of, or None if its module was never imported."""
    return getattr(sys.modules.get(module), name, None)


def _clear(owner: Any, *names: str) -> None:
    """Empty the containers and set the other attributes to None, as far as this torch has them."""
    for name in names:
        value: Any = getattr(owner, name, None)
        if hasattr(value, "clear"):
            value.clear()
        elif value is not None:
            setattr(owner, name, None)


def _drop_gradients(modules: Iterable[Any]) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def fsdp2_states() -> list[Any]:
    """Return the states of all modules under ``fully_shard`` or FSDP2's ``replicate`` in this process."""
    kind = loaded_class(FSDP2_STATE, "FSDPState")
    mapping = loaded_class("torch.distributed._composable_state", "_module_state_mapping")
    if kind is None or mapping is None:
        return []
    states = (reference() for reference in list(mapping.values()))
    return list({id(state): state for state in states if isinstance(state, kind)}.values())


def _fsdp2_groups(state: Any) -> list[Any]:
    """Return a module's parameter groups, which torch keeps in a list since 2.12; before, there was one or None."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def fsdp2_parameters(state: Any) -> list[Any]:
    """Return the sharded parameters of one module."""
    return [parameter.sharded_param for group in _fsdp2_groups(state) for parameter in group.fsdp_params]


def fsdp2_named(state: Any) -> list[tuple[str, Any]]:
    """Return the sharded parameters of one module with their names, as far as torch has named them."""
    parameters = [parameter for group in _fsdp2_groups(state) for parameter in group.fsdp_params]
    return [(parameter._param_fqn or f"parameter {place}", parameter.sharded_param) for place, parameter in enumerate(parameters)]


def fsdp2_ranks(states: list[Any]) -> tuple[int, ...]:
    """Return the global ranks over which the modules of one tree are sharded or replicated."""
    meshes = [group.mesh_info.mesh.mesh for state in states for group in _fsdp2_groups(state)]
    return tuple(sorted({int(rank) for mesh in meshes for rank in mesh.flatten()}))


def fsdp2_unsynced() -> int:
    """Return the number of parameter groups whose gradients are not being reduced now."""
    return sum(not group.reduce_grads for state in fsdp2_states() for group in _fsdp2_groups(state))


def fsdp2_in_flight(state: Any) -> bool:
    """Return whether this module is in a forward or backward, or its tree is still being prepared for its first forward."""
    context, idle = state._state_ctx, type(state._training_state).IDLE
    if state._is_root and not _fsdp2_initialized(state):
        return True
    if context.iter_forward_root is not None or context.post_backward_final_callback_queued:
        return True
    return state._training_state is not idle or any(group._training_state is not idle for group in _fsdp2_groups(state))


def reset_fsdp2(states: list[Any]) -> None:
    """Drop the current iteration of all modules of one tree."""
    for state in states:
        for group in _fsdp2_groups(state):
            _reset_fsdp2_group(group)
        state._training_state = type(state._training_state).IDLE
        _clear(state, "_modules_to_run_forward")
        _clear(state._comm_ctx, *_PENDING_OF_TREE)
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
    for state in states:
        if not state._is_root:
            continue
        if not _fsdp2_initialized(state):
            _forget_first_forward(state)
        elif hasattr(root := state._modules[0], "reset_iter_state"):
            root.reset_iter_state()
    _drop_gradients(module for state in states for module in state._modules)


_PENDING_OF_TREE = (
    "all_gather_state",
    "reduce_scatter_state",
    "reduce_scatter_states",
    "post_forward_order",
    "_last_post_reduce_events",
    "active_gradient_reduction",  # since 2.15; the public reset refuses to drop that of another root
)
_PENDING_OF_GROUP = (
    "_all_gather_result",
    "_post_reduce_event",
    "_all_reduce_state",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
    "_post_forward_indices",
)


def _reset_fsdp2_group(group: Any) -> None:
    _clear(group, *_PENDING_OF_GROUP)
    group._training_state = type(group._training_state).IDLE
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None
            # Do this whatever the state says: the cut may have come between two parameters of one group.
            parameter.to_sharded()
        # Up to 2.14 this is a gradient of its own. Since 2.15 it cannot be set: it is the unsharded parameter's, dropped above.
        _clear(parameter, "unsharded_accumulated_grad")
        _clear(parameter, "grad_offload_event", "_sharded_post_forward_param", "_sharded_post_forward_param_data")
        parameter.sharded_param.grad = None
    group._sharded_state = type(group._sharded_state).SHARDED


def _fsdp2_initialized(root: Any) -> bool:
    """Return whether the first forward was fully prepared; that is when all modules get the root's context."""
    states = _fsdp2_tree(root)
    shared = all(state._state_ctx is root._state_ctx and state._comm_ctx is root._comm_ctx for state in states)
    groups = [group for state in states for group in _fsdp2_groups(state)]
    return shared and all(group._module_to_pre_save_state_dict_hook_handle for group in groups if group.fsdp_params)


def _fsdp2_tree(root: Any) -> list[Any]:
    found = map(loaded_class("torch.distributed._composable_state", "_get_module_state"), root._modules[0].modules())
    kind = loaded_class(FSDP2_STATE, "FSDPState")
    return list({id(state): state for state in found if isinstance(state, kind)}.values())


def _forget_first_forward(root: Any) -> None:
    """Make the next forward prepare again; each of its steps may be repeated."""
    root._state_ctx, root._comm_ctx = type(root._state_ctx)(), type(root._comm_ctx)()
    for state in _fsdp2_tree(root):
        state._is_root = None


# ---- FSDP1 -----------------------------------------------------------------------------------------------------------


def flat_parameters(module: Any) -> list[Any]:
    """Return the flat parameter of one FSDP1 module and the original parameters that are views into it."""
    if module._handle is None:
        return []
    flat = module._handle.flat_param
    return [flat, *(flat._params or ()), *(flat._shared_params or ())]


def flat_names(module: Any) -> list[str]:
    """Return the names of the parameters in one FSDP1 module's flat parameter; they are equal on all ranks."""
    return list(module._handle.flat_param._fqns) if module._handle is not None else []


def fsdp1_in_flight(module: Any) -> bool:
    """Return whether this module is in a forward, a backward or a state_dict, or its tree is still being prepared."""
    if getattr(module, "_is_root", None) and not all(map(_fsdp1_initialized, _fsdp1_tree(module))):
        return True
    if module.training_state is not type(module.training_state).IDLE or getattr(module, "_post_backward_callback_queued", False):
        return True
    if module._unshard_params_ctx:
        return True
    handle = module._handle
    return handle is not None and handle._training_state is not type(handle._training_state).IDLE


def reset_fsdp1(modules: list[Any]) -> None:
    """Drop the current iteration of all modules of one tree."""
    for module in modules:
        # state_dict's hooks enter and leave this context; an error in between leaves it open.
        while module._unshard_params_ctx:
            _, context = module._unshard_params_ctx.popitem()
            with contextlib.suppress(Exception):
                context.__exit__(None, None, None)
    for module in modules:
        if module._handle is not None and hasattr(module._handle.flat_param, "_local_shard"):
            _reset_handle(module._handle)
        module.training_state = type(module.training_state).IDLE
        _clear(module, "_unshard_event")
        _clear(module._exec_order_data, "handles_post_forward_order")
        module._exec_order_data.current_order_index = 0
        _clear(module._free_event_queue, "_queue")
        if getattr(module, "_post_backward_callback_queued", False):
            module._post_backward_callback_queued = False
    for module in modules:
        if module._is_root and not all(map(_fsdp1_initialized, _fsdp1_tree(module))):
            _clear(module._exec_order_data, "all_handles")
            for child in _fsdp1_tree(module):
                child._is_root = None
    _drop_gradients(modules)


def _reset_handle(handle: Any) -> None:
    flat = handle.flat_param
    for parameter in (flat, *(flat._params or ()), *(flat._shared_params or ())):
        parameter.grad = None
    for name in ("_post_backward_hook_state", "_post_backward_hook_handle"):
        hook = getattr(flat, name, None)
        if hook is not None:
            (hook[-1] if isinstance(hook, tuple) else hook).remove()
            delattr(flat, name)
    if hasattr(flat, "_saved_grad_shard"):
        del flat._saved_grad_shard
    flat._post_backward_called = False
    # In this state resharding neither keeps unsharded views nor reads gradients, and it drops saved tensors.
    handle._training_state = type(handle._training_state).BACKWARD_POST
    handle.reshard(False)
    for name in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
        tensor = getattr(flat, name, None)
        if tensor is not None and tensor.untyped_storage().size():
            tensor.untyped_storage().resize_(0)
    handle._training_state = type(handle._training_state).IDLE
    handle._needs_pre_forward_unshard = handle._needs_pre_backward_unshard = False
    handle._prefetched = handle._ran_pre_backward_hook = False
    handle._post_forward_index = None


def _fsdp1_tree(root: Any) -> list[Any]:
    return [module for module in root.modules() if isinstance(module, loaded_class(FSDP1, "FullyShardedDataParallel"))]


def _fsdp1_initialized(module: Any) -> bool:
    return hasattr(module, "_unshard_stream") and (module._handle is None or hasattr(module._handle.flat_param, "_local_shard"))


# ---- DDP and the rest ------------------------------------------------------------------------------------------------


def ddp_in_flight(module: Any) -> bool:
    """Return whether a backward of this module has begun to reduce gradients and has not ended."""
    if getattr(module, "reducer", None) is None:
        return True
    try:
        module.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def restart_ddp(module: Any) -> None:
    """Reset the reducer, in the same way on all ranks. Gradients stay as they are."""
    if getattr(module, "reducer", None) is not None:
        # Setting the same group again resets the reducer, so that its next rebuild of buckets starts in the same way on all ranks.
        module._update_process_group(module.process_group)
        # Whether the next forward broadcasts buffers depends on whether the last one was inside no_sync().
        module.require_forward_param_sync = True
    loaded_class(DDP, "DistributedDataParallel")._active_ddp_module = None


def reset_ddp(module: Any) -> None:
    """Drop the current iteration of a DistributedDataParallel module."""
    restart_ddp(module)
    _drop_gradients([module])


def reset_scaler(scaler: Any) -> None:
    """Forget that a scaler has unscaled gradients. They are gone, and its next step would raise otherwise."""
    getattr(scaler, "_per_optimizer_states", {}).clear()
