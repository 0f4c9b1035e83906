"""Finds every data-parallel wrapper in this process, and drops the iteration that an interrupt has cut off."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
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


def reset(found: Wrappers, *, only_in_flight: bool = False) -> tuple[int, list[str]]:
    """Drop the iteration under way: parameters sharded, states idle, gradients None.

    Args:
        found: The wrappers.
        only_in_flight: Leave alone what stands between two iterations, or between a forward and its backward.

    Returns:
        The number of models that were reset, and a sentence for each that could not be.

    Ranks: local. To be called on all ranks alike, after the process groups work again.
    """
    work: list[tuple[str, Any, Any]] = []
    for states in found.fsdp2:
        if not only_in_flight or any(map(private.fsdp2_in_flight, states)):
            work.append(("FSDP2 model", private.reset_fsdp2, states))
    for modules in found.fsdp1:
        if not only_in_flight or any(map(private.fsdp1_in_flight, modules)):
            work.append(("FSDP1 model", private.reset_fsdp1, modules))
    if not only_in_flight:
        # Nothing tells from outside whether a DDP model is inside an iteration.
        work += [("DDP model", private.reset_ddp, module) for module in found.ddp]
        for scaler in found.scalers:
            private.reset_scaler(scaler)
        for tensor in found.dtensors:
            tensor.grad = None
    problems = [problem for item in work for problem in _attempt(*item)]
    return len(work) - len(problems), problems


def _is_made(module: Any, *attributes: str) -> bool:
    """Whether a module's making has come far enough to look into it."""
    return all(name in vars(module) for name in ("_modules", "_parameters", *attributes))


def _attempt(what: str, function: Any, *args: Any) -> list[str]:
    try:
        function(*args)
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
