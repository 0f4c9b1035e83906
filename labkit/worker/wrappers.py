"""Finds every data-parallel wrapper in this process, and drops the iteration that an interrupt has cut off."""

from __future__ import annotations

import functools
import gc
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from labkit.worker import fsdp_private as private


@dataclass
class Wrappers:
    """What :func:`find` found.

    Attributes:
        fsdp2: States of ``fully_shard`` and of FSDP2's ``replicate``, one list per tree of modules.
        fsdp1: FullyShardedDataParallel modules, one list per tree.
        ddp: DistributedDataParallel modules, those of the composable ``replicate`` included.
        dtensors: Leaf DTensors that require gradients.
        scalers: Gradient scalers.
    """

    fsdp2: list[list[Any]] = field(default_factory=list)
    fsdp1: list[list[Any]] = field(default_factory=list)
    ddp: list[Any] = field(default_factory=list)
    dtensors: list[torch.Tensor] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)

    def owners(self) -> dict[int, Any]:
        """By the id of each parameter that is sharded or replicated: the module that does it, or the DTensor itself."""
        found: dict[int, Any] = {id(tensor): tensor for tensor in self.dtensors}
        for module in (*self.ddp, *(module for tree in self.fsdp1 for module in tree)):
            found.update(dict.fromkeys(map(id, module.parameters()), module))
        for module in (module for tree in self.fsdp1 for module in tree):
            found.update(dict.fromkeys(map(id, private.flat_parameters(module)), module))
        for state in (state for tree in self.fsdp2 for state in tree):
            found.update(dict.fromkeys(map(id, private.fsdp2_parameters(state)), state._modules[0]))
        return found


def find() -> Wrappers:
    """Look for every wrapper in this process. Takes some 30 ms: Python's garbage collector lists the instances."""
    found = Wrappers(fsdp2=_by_tree(private.fsdp2_states(), "_state_ctx"))
    fsdp1 = private.loaded_class(private.FSDP1, "FullyShardedDataParallel")
    ddp = private.loaded_class(private.DDP, "DistributedDataParallel")
    scaler = private.loaded_class("torch.amp.grad_scaler", "GradScaler")
    dtensor = private.loaded_class("torch.distributed.tensor", "DTensor")
    kinds = [kind for base in (fsdp1, ddp, scaler, dtensor) if base is not None for kind in _with_subclasses(base)]
    modules = []
    for item in gc.get_referrers(*kinds):
        kind = type(item)  # isinstance() would ask a lazy proxy object for its class, which may run code of its own
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
        signature: Tells models apart on different ranks: its kind and its parameters' names or shapes. Models that look alike
            have the same.
        module: The outermost module that is known of it; None for DTensors under no wrapper.
        parameters: Its parameters by name, where the ranks can be compared by them.
        graded: A text that tells which of them have a gradient; empty where none has.
        in_flight: A forward or backward of it has begun and not ended.
        reset: Drops that.
    """

    kind: str
    signature: str
    module: Any
    parameters: Mapping[str, torch.Tensor]
    graded: str
    in_flight: bool
    reset: Callable[[], None]


def models(found: Wrappers, *, in_backward: bool = False) -> list[Model]:
    """Return the models.

    Args:
        found: The wrappers.
        in_backward: The run was cut inside a backward. Of DDP models and DTensors nothing else tells that for sure: those of
            them that were in no backward are taken for cut as well.
    """
    listed = []
    for states in found.fsdp2:
        root = next((state for state in states if state._is_root), states[0])._modules[0]
        named = {name: parameter for state in states for name, parameter in private.fsdp2_named(state)}
        shapes = sorted(str(tuple(parameter.shape)) for state in states for parameter in private.fsdp2_parameters(state))
        in_flight = any(map(private.fsdp2_in_flight, states))
        listed.append(
            _model("FSDP2 model", shapes, root, named, _graded(named), in_flight, functools.partial(private.reset_fsdp2, states))
        )
    for modules in found.fsdp1:
        names = sorted(name for module in modules for name in private.flat_names(module))
        in_flight = any(map(private.fsdp1_in_flight, modules))
        root = next((module for module in modules if getattr(module, "_is_root", None)), modules[0])
        # Each rank holds some of the parameters only.
        graded = "some" if any(parameter.grad is not None for parameter in root.parameters()) else ""
        listed.append(_model("FSDP1 model", names, root, {}, graded, in_flight, functools.partial(private.reset_fsdp1, modules)))
    for module in found.ddp:
        named = dict(module.module.named_parameters()) if "module" in vars(module)["_modules"] else {}
        names = [f"{name}{tuple(parameter.shape)}" for name, parameter in named.items()]
        in_flight = in_backward or private.ddp_in_flight(module)
        listed.append(
            _model("DDP model", names, module, named, _graded(named), in_flight, functools.partial(private.reset_ddp, module))
        )
    owned = {id(parameter) for states in found.fsdp2 for state in states for parameter in private.fsdp2_parameters(state)}
    if loose := [tensor for tensor in found.dtensors if id(tensor) not in owned]:
        graded = str(sum(tensor.grad is not None for tensor in loose) or "")
        listed.append(_model("DTensors", (), None, {}, graded, in_backward, functools.partial(_drop_gradients, loose)))
    return listed


def _graded(named: Mapping[str, torch.Tensor]) -> str:
    found = [name for name, parameter in named.items() if parameter.grad is not None]
    return hashlib.blake2b("\n".join(found).encode(), digest_size=8).hexdigest() if found else ""


def _model(kind: str, parts: Sequence[str], module: Any, *rest: Any) -> Model:
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
    return Model(kind, f"{kind} {digest}", module, *rest)


def _drop_gradients(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def reset(found: Wrappers, drop: Collection[str]) -> tuple[int, list[str]]:
    """Drop the iteration under way of some models: parameters sharded, states idle, gradients None.

    Args:
        found: The wrappers.
        drop: The models' signatures.

    Returns:
        The number of models that were reset, and a sentence for each that could not be.

    Ranks: local. To be called on all ranks alike, after the process groups work again.
    """
    dropped = [model for model in models(found) if model.signature in drop]
    problems = [problem for model in dropped for problem in _attempt(model.kind, model.reset)]
    if dropped:
        for scaler in found.scalers:
            private.reset_scaler(scaler)
    return len(dropped) - len(problems), problems


def restart_reducers(found: Wrappers) -> list[str]:
    """Let DDP's reducers begin anew on all ranks alike: one may have come further than another in the preparations of a forward."""
    return [problem for module in found.ddp for problem in _attempt("DDP model", functools.partial(private.restart_ddp, module))]


def fingerprints(model: Model) -> dict[str, str]:
    """Return one text for each parameter that is equal on all ranks that have changed it alike; empty where there is none.

    Of replicas it is made of their values. A shard's values are its own, so there it is the number of changes in place, as
    autograd counts them; changes through ``.data`` are not counted.
    """
    if model.kind == "DDP model":
        return {name: _sum_of_bits(parameter) for name, parameter in model.parameters.items()}
    return {name: f"{parameter._version} changes" for name, parameter in model.parameters.items()}


def _sum_of_bits(tensor: torch.Tensor) -> str:
    values = tensor.detach().contiguous()
    size = values.element_size()
    return str(int(values.flatten().view(_INTEGERS[size]).sum(dtype=torch.int64))) if size in _INTEGERS else ""


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_made(module: Any, *attributes: str) -> bool:
    """Whether a module's making has come far enough to look into it."""
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
