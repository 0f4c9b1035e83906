"""The only place in `labkit.spmd` that touches private parts of FSDP1 and FSDP2: an adapter that reports what their runtimes do.

Neither runtime has public hooks for "parameters are being gathered" or "freed". While a trace runs, this adapter wraps the few
functions that do it and reports to an `Observer`, in the same terms for both. It does not change what torch does, and adds no
collective. `self_test` checks every assumption made here about torch; they hold for torch 2.11 to 2.15.

Sources: ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`` (FSDP2), ``torch/distributed/fsdp/_flat_param.py`` and
``_runtime_utils.py`` (FSDP1).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _runtime_utils
from torch.distributed.fsdp import fully_sharded_data_parallel as _fsdp1
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as _fsdp2

from labkit.errors import LabkitError

Group = Any  # an FSDPParamGroup of FSDP2 or a FlatParamHandle of FSDP1
_Handle = _flat_param.FlatParamHandle
_ParamGroup = _fsdp2.FSDPParamGroup


class TraceError(LabkitError, RuntimeError):
    """This torch lacks something that the tracer needs; the message names the private function or attribute."""


class Observer(Protocol):
    """The callbacks of the adapter, one call per event and parameter group."""

    def unshard(self, group: Group, call: Callable[[], Any], starts: Callable[[], bool]) -> Any:
        """Handle an unshard, which ``call`` performs; ``starts``, called first, returns whether there is anything to do."""

    def wait(self, group: Group, call: Callable[[], Any]) -> Any:
        """Handle the computation's wait for parameters, which are whole when ``call`` returns."""

    def reshard(self, group: Group, call: Callable[[], Any]) -> Any:
        """Handle a reshard. ``call`` may free parameters; `kept_bytes` then returns the bytes that remain."""

    def reduce(self, group: Group, call: Callable[[], Any]) -> Any:
        """Handle the reduction of the group's gradients, which ``call`` performs."""

    def begin(self, group: Group, phase: str, call: Callable[[], Any]) -> Any:
        """Handle the beginning of the group's ``forward`` or ``backward``: it begins when ``call``, which prepares it, returns."""

    def end(self, group: Group, phase: str, call: Callable[[], Any]) -> Any:
        """Handle the end of the group's ``forward`` or ``backward``; ``call`` cleans up."""


def groups_of(model: nn.Module) -> dict[Group, list[str]]:
    """Return every parameter group in a model, with the FQNs of its modules, ``""`` for the model itself.

    FSDP1's wrappers are left out of the names.
    """
    found: dict[Group, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=True):
        clean = ".".join(part for part in name.split(".") if part not in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
        for group in _groups_at(module):
            found.setdefault(group, []).append(clean)
    return found


def _groups_at(module: nn.Module) -> list[Group]:
    if isinstance(module, FullyShardedDataParallel):
        return [module._handle] if module._handle else []
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)  # a list since 2.12, one or None before
    if groups is None:
        single = getattr(state, "_fsdp_param_group", None)
        groups = [] if single is None else [single]
    return list(groups)


def whole_bytes(group: Group) -> int:
    """Return the bytes of the group's unsharded parameters, in the dtype of the computation."""
    if isinstance(group, _Handle):
        flat = group.flat_param
        size = flat._unpadded_unsharded_size.numel() if group.uses_sharded_strategy else flat.numel()
        return int(size * (group._fwd_bwd_param_dtype or flat.dtype).itemsize)
    # A group had a policy for all its parameters up to torch 2.14; since 2.15 each parameter may have another.
    dtypes = [param.mp_policy.param_dtype or param.sharded_param.dtype for param in group.fsdp_params]
    return sum(param._orig_size.numel() * dtype.itemsize for param, dtype in zip(group.fsdp_params, dtypes, strict=True))


def shard_bytes(group: Group) -> int:
    """Return the bytes of the group's parameters that this rank keeps between steps."""
    if isinstance(group, _Handle):
        # Before the first forward, the flat parameter itself is the shard.
        local = getattr(group.flat_param, "_local_shard", group.flat_param)
        return int(local.numel() * local.element_size())
    locals_ = [param.sharded_param.to_local() for param in group.fsdp_params]
    return sum(local.numel() * local.element_size() for local in locals_)


def kept_bytes(group: Group) -> int:
    """Return the bytes of unsharded parameters that the group holds now, beyond its shard."""
    if isinstance(group, _Handle):
        # A replicated handle is its own shard, always whole, so it never counts. Before the first forward there is no buffer.
        ready = group.uses_sharded_strategy and hasattr(group.flat_param, "_full_param_padded")
        return whole_bytes(group) if ready and not group.needs_unshard() else 0
    if group.is_unsharded or group._all_gather_result is not None:
        return whole_bytes(group)
    if group.is_sharded_post_forward:
        return int(whole_bytes(group) // group.post_forward_mesh_info.shard_mesh_size)
    return 0


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Report to an observer everything that FSDP1 and FSDP2 do in this process while the block runs.

    Raises:
        TraceError: This torch is not as expected, see `self_test`.

    Ranks: local.
    """
    self_test()
    with ExitStack() as stack:
        for owner, name, wrapper in (*_fsdp2_patches(observer), *_fsdp1_patches(observer)):
            stack.enter_context(_replaced(owner, name, wrapper))
        yield


_Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_Patch = tuple[Any, str, _Wrapper]


@contextmanager
def _replaced(owner: Any, name: str, wrapper: _Wrapper) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))
    try:
        yield
    finally:
        setattr(owner, name, original)


# FSDP2 ----------------------------------------------------------------------------------------------------------------


def _fsdp2_patches(observer: Observer) -> list[_Patch]:
    def idle(group: Group) -> bool:
        return group._all_gather_result is None and not group.is_unsharded

    def unshard(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: observer.unshard(self, lambda: original(self, *args, **kwargs), lambda: idle(self))

    def simple(tell: Callable[[Group, Callable[[], Any]], Any]) -> _Wrapper:
        return lambda original: lambda self, *args, **kwargs: tell(self, lambda: original(self, *args, **kwargs))

    def phase(tell: Callable[[Group, str, Callable[[], Any]], Any], name: str) -> _Wrapper:
        return lambda original: lambda self, *args, **kwargs: tell(self, name, lambda: original(self, *args, **kwargs))

    def post_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Group, *args: Any, **kwargs: Any) -> Any:
            return observer.end(self, "backward", lambda: observer.reduce(self, lambda: original(self, *args, **kwargs)))

        return wrapped

    return [
        (_ParamGroup, "unshard", unshard),
        (_ParamGroup, "wait_for_unshard", simple(observer.wait)),
        # reshard calls the other two; state-dict hooks call these directly.
        *((_ParamGroup, name, simple(observer.reshard)) for name in ("reshard", "_to_sharded", "_to_sharded_post_forward")),
        (_ParamGroup, "pre_forward", phase(observer.begin, "forward")),
        (_ParamGroup, "post_forward", phase(observer.end, "forward")),
        (_ParamGroup, "pre_backward", phase(observer.begin, "backward")),
        (_ParamGroup, "post_backward", post_backward),
    ]


# FSDP1 ----------------------------------------------------------------------------------------------------------------


def _fsdp1_patches(observer: Observer) -> list[_Patch]:
    def unshard(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: observer.unshard(self, lambda: original(self), self.needs_unshard)

    def reshard(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: observer.reshard(self, lambda: original(self, *args, **kwargs))

    def of_handle(tell: Callable[[Group, Callable[[], Any]], Any], place: int = 1) -> _Wrapper:
        """Wrap functions of ``(state, handle, ...)``. A unit without parameters has no handle and is not reported."""

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                call = functools.partial(original, *args, **kwargs)
                return tell(args[place], call) if args[place] else call()

            return wrapped

        return wrapper

    def pre_backward(group: Group, call: Callable[[], Any]) -> Any:
        # torch calls this for each output that needs a gradient, but only the first call does anything.
        ran = getattr(group, "_ran_pre_backward_hook", False)
        return call() if ran else observer.begin(group, "backward", call)

    def before_prefetch(group: Group, call: Callable[[], Any]) -> Any:
        # The wait is a single line in a longer function; the prefetch of another group, right after it, marks its end.
        if group._training_state != _flat_param.HandleTrainingState.BACKWARD_POST:
            observer.wait(group, lambda: None)
        return call()

    return [
        (_Handle, "unshard", unshard),
        (_Handle, "reshard", reshard),
        (_runtime_utils, "_prefetch_handle", of_handle(before_prefetch)),
        (_fsdp1, "_pre_forward", of_handle(lambda group, call: observer.begin(group, "forward", call))),
        (_fsdp1, "_post_forward", of_handle(lambda group, call: observer.end(group, "forward", call))),
        (_runtime_utils, "_pre_backward_hook", of_handle(pre_backward, place=2)),
        (_runtime_utils, "_post_backward_hook", of_handle(lambda group, call: observer.end(group, "backward", call))),
        (_runtime_utils, "_reduce_grad", of_handle(observer.reduce)),
        (_runtime_utils, "_reduce_grad_no_shard", of_handle(observer.reduce)),
    ]


# Is torch as expected? ------------------------------------------------------------------------------------------------

# The parameters that the wrappers use, by position; they pass all further arguments on unchanged.
_EXPECTED_PARAMETERS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (_ParamGroup, "unshard", ("self",)),
    (_ParamGroup, "wait_for_unshard", ("self",)),
    (_ParamGroup, "reshard", ("self",)),
    (_ParamGroup, "_to_sharded", ("self",)),
    (_ParamGroup, "_to_sharded_post_forward", ("self",)),
    (_ParamGroup, "pre_forward", ("self", "module")),
    (_ParamGroup, "post_forward", ("self", "module")),
    (_ParamGroup, "pre_backward", ("self", "default_prefetch")),
    (_ParamGroup, "post_backward", ("self",)),
    (_Handle, "unshard", ("self",)),
    (_Handle, "reshard", ("self", "free_unsharded_flat_param")),
    (_Handle, "needs_unshard", ("self",)),
    (_fsdp1, "_pre_forward", ("state", "handle")),
    (_fsdp1, "_post_forward", ("state", "handle")),
    (_runtime_utils, "_prefetch_handle", ("state", "current_handle")),
    (_runtime_utils, "_pre_backward_hook", ("state", "module", "handle")),
    (_runtime_utils, "_post_backward_hook", ("state", "handle")),
    (_runtime_utils, "_reduce_grad", ("state", "handle")),
    (_runtime_utils, "_reduce_grad_no_shard", ("state", "handle")),
)
_EXPECTED_ATTRIBUTES = (
    (_ParamGroup, ("is_sharded", "is_unsharded", "is_sharded_post_forward")),
    (_Handle, ("uses_sharded_strategy",)),
    (FullyShardedDataParallel, ("forward",)),
)


def self_test() -> None:
    """Check that this torch has the private functions that the adapter wraps, with the parameters that it relies on.

    Raises:
        TraceError: A name is missing or takes different parameters; the message gives the first one.

    Ranks: local.
    """
    for owner, name, expected in _EXPECTED_PARAMETERS:
        found = getattr(owner, name, None)
        actual = None if found is None else tuple(inspect.signature(found).parameters)
        if actual is None or actual[: len(expected)] != expected:
            state = "is missing" if actual is None else f"takes {actual}, expected {expected} first"
            raise TraceError(f"{_owner_name(owner)}.{name} {state}: the tracer does not support this torch.")
    for owner, names in _EXPECTED_ATTRIBUTES:
        for name in names:
            if not hasattr(owner, name):
                raise TraceError(f"{_owner_name(owner)}.{name} is missing: the tracer does not support this torch.")


def _owner_name(owner: Any) -> str:
    return str(getattr(owner, "__name__", owner))
