"""Take a training state (modules, optimizers, schedulers, tensors, values) apart into flat leaves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from labkit.checkpoint.dcp_writer import Leaf
from labkit.checkpoint.errors import STATE, FQNMismatchError
from labkit.checkpoint.model import Path_
from labkit.checkpoint.modules import module_state
from labkit.checkpoint.names import flat_key
from labkit.checkpoint.optimizers import optimizer_state
from labkit.checkpoint.shards import is_tensor, local_tensor


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
