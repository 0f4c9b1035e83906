"""The data-parallel wrappers in this process: find them, and drop the iteration that an interrupt has cut off."""

from __future__ import annotations

import functools
import gc
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from labkit.worker.groups import backends
from labkit.worker.mend import fsdp_private as private


@dataclass
class Wrappers:
    """The wrappers that :func:`find` found.

    Attributes:
        fsdp2: States of ``fully_shard`` and of FSDP2's ``replicate``, one list per tree of modules.
        fsdp1: FullyShardedDataParallel modules, one list per tree.
        ddp: DistributedDataParallel modules, including those of the composable ``replicate``.
        dtensors: Leaf DTensors that require gradients.
        scalers: Gradient scalers.
    """

    fsdp2: list[list[Any]] = field(default_factory=list)
    fsdp1: list[list[Any]] = field(default_factory=list)
    ddp: list[Any] = field(default_factory=list)
    dtensors: list[torch.Tensor] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)

    def owners(self) -> dict[int, Any]:
        """Return, by the id of each sharded or replicated parameter, the module that wraps it, or the DTensor itself."""
        found: dict[int, Any] = {id(tensor): tensor for tensor in self.dtensors}
        for module in (*self.ddp, *(module for tree in self.fsdp1 for module in tree)):
            found.update(dict.fromkeys(map(id, module.parameters()), module))
        for module in (module for tree in self.fsdp1 for module in tree):
            found.update(dict.fromkeys(map(id, private.flat_parameters(module)), module))
        for state in (state for tree in self.fsdp2 for state in tree):
            found.update(dict.fromkeys(map(id, private.fsdp2_parameters(state)), state._modules[0]))
        return found


def find() -> Wrappers:
    """Find every wrapper in this process. Takes about 30 ms: Python's garbage collector lists the instances."""
    found = Wrappers(fsdp2=_by_tree(private.fsdp2_states(), "_state_ctx"))
    fsdp1 = private.loaded_class(private.FSDP1, "FullyShardedDataParallel")
    ddp = private.loaded_class(private.DDP, "DistributedDataParallel")
    scaler = private.loaded_class("torch.amp.grad_scaler", "GradScaler")
    dtensor = private.loaded_class("torch.distributed.tensor", "DTensor")
    kinds = [kind for base in (fsdp1, ddp, scaler, dtensor) if base is not None for kind in _with_subclasses(base)]
    modules = []
    for item in gc.get_referrers(*kinds):
        kind = type(item)  # isinstance() would ask a lazy proxy object for its class, which may run its own code
        if fsdp1 is not None and issubclass(kind, fsdp1):
            if _is_made(item, "_handle", "_exec_order_data"):
                modules.append(item)
        elif ddp is not None and issubclass(kind, ddp):
            if _is_made(item):
                found.ddp.append(item)
        elif scaler is not None and issubclass(kind, scaler):
            found.scalers.append(item)
        elif dtensor is not None and issubclass(kind, dtensor) and item.is_leaf and item.requires_grad:
            found.dtensors.append(item)
    found.fsdp1 = _by_tree(modules, "_exec_order_data")
    return found


@dataclass(frozen=True)
class Model:
    """A model of this process under one wrapper.

    Attributes:
        kind: For example ``FSDP2 model``.
        signature: Identifies a model across ranks: its kind and its parameters' names or shapes. Models that look alike have the
            same signature.
        module: Its outermost known module; None for DTensors without a wrapper.
        ranks: The ranks over which it is sharded or replicated, if they can be compared.
        parameters: Its parameters by name, if the ranks can be compared by them.
        graded: A text that identifies which of them have a gradient; empty if none has.
        in_flight: Whether a forward or backward of it has begun and not ended.
        reset: Drops that forward or backward.
    """

    kind: str
    signature: str
    module: Any
    ranks: tuple[int, ...]
    parameters: Mapping[str, torch.Tensor]
    graded: str
    in_flight: bool
    reset: Callable[[], None]


def models(found: Wrappers, *, in_backward: bool = False) -> list[Model]:
    """Return the data-parallel models among the wrappers.

    Args:
        found: The wrappers.
        in_backward: Whether the run was cut inside a backward. For DDP models and DTensors nothing else shows that reliably, so
            those that were not in the backward are treated as cut as well.
    """
    owned = {id(parameter) for states in found.fsdp2 for state in states for parameter in private.fsdp2_parameters(state)}
    loose = [tensor for tensor in found.dtensors if id(tensor) not in owned]
    made = [_made("FSDP2 model", _fsdp2_model, private.reset_fsdp2, states) for states in found.fsdp2]
    made += [_made("FSDP1 model", _fsdp1_model, private.reset_fsdp1, modules) for modules in found.fsdp1]
    made += [_made("DDP model", functools.partial(_ddp_model, in_backward), private.reset_ddp, module) for module in found.ddp]
    if loose:
        made.append(_made("DTensors", functools.partial(_loose_tensors, in_backward), _drop_gradients, loose))
    return made


class _Parts(NamedTuple):
    shape: Iterable[str]
    module: Any
    ranks: tuple[int, ...]
    parameters: Mapping[str, torch.Tensor]
    graded: str
    in_flight: bool


def _made(kind: str, look: Callable[[Any], _Parts], reset: Callable[[Any], None], item: Any) -> Model:
    act = functools.partial(reset, item)
    try:
        parts = look(item)
    except Exception:
        # Its construction was cut off. A model about which nothing is known is treated as cut.
        return Model(kind, f"{kind}, half made", None, (), {}, "", in_flight=True, reset=act)
    digest = hashlib.blake2b("\n".join(parts.shape).encode(), digest_size=8).hexdigest()
    return Model(kind, f"{kind} {digest}", parts.module, parts.ranks, parts.parameters, parts.graded, parts.in_flight, act)


def _fsdp2_model(states: list[Any]) -> _Parts:
    root = next((state for state in states if state._is_root), states[0])
    named = {name: parameter for state in states for name, parameter in private.fsdp2_named(state)}
    shapes = sorted(str(tuple(parameter.shape)) for state in states for parameter in private.fsdp2_parameters(state))
    in_flight = any(map(private.fsdp2_in_flight, states))
    return _Parts(shapes, root._modules[0], private.fsdp2_ranks(states), named, _graded(named), in_flight)


def _fsdp1_model(modules: list[Any]) -> _Parts:
    names = sorted(name for module in modules for name in private.flat_names(module))
    root = next((module for module in modules if module._is_root), modules[0])
    # Each rank holds only some of the parameters.
    graded = "some" if any(parameter.grad is not None for parameter in root.parameters()) else ""
    return _Parts(names, root, (), {}, graded, any(map(private.fsdp1_in_flight, modules)))


def _ddp_model(in_backward: bool, module: Any) -> _Parts:
    named = dict(module.module.named_parameters())
    shape = [f"{name}{tuple(parameter.shape)}" for name, parameter in named.items()]
    ranks = backends.group_ranks(module.process_group)
    return _Parts(shape, module, ranks, named, _graded(named), in_backward or private.ddp_in_flight(module))


def _loose_tensors(in_backward: bool, tensors: list[torch.Tensor]) -> _Parts:
    graded = sum(tensor.grad is not None for tensor in tensors)
    return _Parts((), None, (), {}, str(graded or ""), in_backward)


def _graded(named: Mapping[str, torch.Tensor]) -> str:
    found = [name for name, parameter in named.items() if parameter.grad is not None]
    return hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest() if found else ""


def _drop_gradients(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def reset(found: Wrappers, drop: Collection[str]) -> tuple[int, list[str]]:
    """Drop the iteration under way of some models: parameters sharded, states idle, gradients None.

    Args:
        found: The wrappers.
        drop: The models' signatures.

    Returns:
        The number of models that were reset, and a sentence for each model that could not be reset.

    Ranks: local. Call it on all ranks in the same way, after the process groups work again.
    """
    dropped = [model for model in models(found) if model.signature in drop]
    problems = [problem for model in dropped for problem in _attempt(model.kind, model.reset)]
    if dropped:
        for scaler in found.scalers:
            private.reset_scaler(scaler)
    return len(dropped) - len(problems), problems


def restart_reducers(found: Wrappers) -> list[str]:
    """Reset DDP's reducers on all ranks in the same way: one rank may have prepared more of a forward than another."""
    return [problem for module in found.ddp for problem in _attempt("DDP model", functools.partial(private.restart_ddp, module))]


def fingerprints(model: Model) -> dict[str, str]:
    """Return one text for each parameter, equal on all ranks that changed it in the same way; empty if it has none.

    For replicas the text depends on their values. A shard's values exist on one rank only, so for shards it is the number of
    changes in place, as autograd counts them; changes through ``.data`` are not counted.
    """
    print_of = _sum_of_bits if model.kind == "DDP model" else _changes
    return {name: print_of(parameter) for name, parameter in model.parameters.items()}


def _changes(tensor: torch.Tensor) -> str:
    return f"{tensor._version} changes"


def _sum_of_bits(tensor: torch.Tensor) -> str:
    """Return the sum of a tensor's values taken as integers; empty for tensors without such values, such as DTensors."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.element_size() not in _INTEGERS:
        return ""
    try:
        values = tensor.detach().contiguous().flatten().view(_INTEGERS[tensor.element_size()])
        return str(int(values.sum(dtype=torch.int64)))
    except RuntimeError:
        return ""


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_made(module: Any, *attributes: str) -> bool:
    """Return whether a module is constructed far enough to look into it."""
    return all(name in vars(module) for name in ("_modules", "_parameters", *attributes))


def _attempt(what: str, act: Callable[[], None]) -> list[str]:
    try:
        act()
    except Exception as error:
        return [f"A {what} could not be brought back ({type(error).__name__}: {error}); build it again and load its checkpoint."]
    return []


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = type.__subclasses__(kind)
    for subclass in subclasses:
        yield from _with_subclasses(subclass)


def _by_tree(items: Iterable[Any], shared: str) -> list[list[Any]]:
    """Group the wrappers of one tree of modules; after the first forward they share their root's context."""
    trees: dict[int, list[Any]] = {}
    for item in items:
        trees.setdefault(id(getattr(item, shared)), []).append(item)
    return list(trees.values())
