"""Splitting of a training state (modules, optimizers, schedulers, tensors, values) into flat leaves.

The nested dicts and lists of a state determine the names. They belong to the caller, so a load fills them instead of replacing
them. A ``dict`` or ``OrderedDict`` is split if all its keys are str or int; an int becomes its digits, so 3 and "3" give the same
name, and having both is refused. A list is split if it contains a tensor or a dict that is split.

An object's ``state_dict`` result, on the other hand, must be rebuilt from the file. So there only dicts with str keys are split,
and the order of each OrderedDict is saved beside its items. Anything that is not split is stored whole as one value;
:mod:`labkit.checkpoint.pickles.values` lists the possible values. An object's tensors are restored as new tensors on the CPU. A
sharded tensor is loaded into the tensor that the object's ``state_dict`` returns at load time; if that tensor is not sharded, it is
restored whole.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from labkit.checkpoint.errors import STATE, CheckpointMismatchError, FQNMismatchError, UnsavableStateError
from labkit.checkpoint.index.model import Path_
from labkit.checkpoint.index.names import flat_key
from labkit.checkpoint.pickles.values import MAX_DEPTH, lost_attributes, snapshot
from labkit.checkpoint.state.modules import is_extra_state, module_state, not_handed_back
from labkit.checkpoint.state.optimizers import optimizer_state
from labkit.checkpoint.state.shards import LocalTensor, is_sharded, is_tensor, local_tensor
from labkit.checkpoint.write.dcp_writer import Leaf

ORDER = "<OrderedDict>"


@dataclass
class PerRank:
    """A value that differs between ranks: each rank saves its own under ``rank_0``, ``rank_1`` ... and loads it back.

    Attributes:
        value: Plain data, tensors, nested dicts of these, a module that is entirely on this rank, or an object with ``state_dict``
            and ``load_state_dict``.
    """

    value: Any


class Rng:
    """This process's random number generators as state: Python's, numpy's, and torch's on the CPU and every visible GPU.

    Wrap it in :class:`PerRank`, because every rank has its own: ``{"rng": PerRank(Rng())}``. numpy's is included if numpy is
    imported.

    Ranks: local.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states, as tensors and plain data."""
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": list(random.getstate())}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = {str(index): torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())}
        numpy = _numpy_random()
        if numpy is not None:
            name, keys, *rest = numpy.get_state()
            state["numpy"] = [name, keys.tolist(), *rest]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators to a state from :meth:`state_dict`, ignoring states of GPUs that this process does not have."""
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
    """A training state split into leaves.

    Attributes:
        leaves: This rank's values by flat key; tensors share memory with the live ones if possible.
        modules: Key prefix to module.
        optimizers: Key prefix to optimizer.
        objects: Key prefix to other objects with ``state_dict`` and ``load_state_dict``.
        sharded: The sharded tensors in objects, by flat key.
        per_rank: Key prefixes of :class:`PerRank` values, excluding the rank.
        replicas: For each flat key, a label: ranks with the same label must hold equal values; see
            :class:`labkit.checkpoint.state.shards.LocalTensor`.
        problems: Sentences about entries that a save cannot store or a load cannot fill.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    modules: dict[Path_, nn.Module] = field(default_factory=dict)
    optimizers: dict[Path_, Optimizer] = field(default_factory=dict)
    objects: dict[Path_, Any] = field(default_factory=dict)
    sharded: dict[str, Any] = field(default_factory=dict)
    per_rank: list[Path_] = field(default_factory=list)
    replicas: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def is_own(self, path: Path_) -> bool:
        """Return whether a path leads into a :class:`PerRank` value."""
        return any(path[: len(prefix)] == prefix for prefix in self.per_rank)


def capture(state: Mapping[str, Any], rank: int, *, saving: bool = True) -> Captured:
    """Split a training state; for a save, also find everything that a load would not restore.

    Args:
        state: Nested dicts whose leaves are tensors of any kind, plain values, :class:`PerRank`, modules, optimizers, or
            objects with ``state_dict`` and ``load_state_dict`` (schedulers, data loaders).
        rank: This rank, for per-rank values.
        saving: Whether to read and check the contents of optimizers, objects and values, rather than only note what a load can
            fill.

    Raises:
        FQNMismatchError: Two leaves get the same name; or an optimizer holds tensors that are not parameters of a module in the
        state (for example, it was built before ``fully_shard`` replaced them, so its steps change nothing). UnsavableStateError: A
        value or tensor would not be restored unchanged; the message names all of them. CheckpointMismatchError: A tensor cannot be
        filled; or FSDP1 is combined with tensor parallelism, whose optimizer state
            torch restores wrongly.

    Ranks: collective if an FSDP1 module is in the state, else local.
    """
    found = Captured()
    plain: list[tuple[Path_, Any]] = []
    if not isinstance(state, dict) or (state and not _is_open(state, rebuilt=False)):
        raise UnsavableStateError(STATE, [f"it is a {type(state).__name__}, not a dict with str or int keys"])
    for key, item in state.items():
        _sort(item, _below((), key, found), found, plain, rank)
    for path, module in found.modules.items():
        parts = module_state(module)
        reasons = not_handed_back(module, parts)
        found.problems.extend(f"{flat_key((*path, name))} {reason}" for name, reason in reasons.items())
        for name, value in parts.items():
            if name not in reasons:
                _add(found, (*path, name), value, rebuilt=is_extra_state(name), saving=saving)
    for path, optimizer in found.optimizers.items() if saving else ():
        for sub, value in walk(optimizer_state(optimizer, found.modules), path):
            _add(found, sub, value, rebuilt=True, saving=saving)
    for path, value in found.objects.items():
        _add_object(found, path, value.state_dict(), saving)
    for path, value in plain:
        _add(found, path, value, rebuilt=False, saving=saving)
    if found.problems:
        raise (UnsavableStateError if saving else CheckpointMismatchError)(STATE, found.problems)
    return found


def _sort(value: Any, path: Path_, found: Captured, plain: list[tuple[Path_, Any]], rank: int) -> None:
    if isinstance(value, PerRank):
        found.per_rank.append(path)
        _sort(value.value, (*path, f"rank_{rank}"), found, plain, rank)
    elif isinstance(value, nn.Module):
        found.modules[path] = value
    elif isinstance(value, Optimizer):
        found.optimizers[path] = value
    elif isinstance(value, dict) and _is_open(value, rebuilt=False):
        for key, item in value.items():
            _sort(item, _below(path, key, found), found, plain, rank)
    elif not is_tensor(value) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        found.objects[path] = value
    else:
        plain.extend(walk(value, path, rebuilt=False))


def _below(path: Path_, key: Any, found: Captured) -> Path_:
    try:
        str(key).encode()
    except UnicodeEncodeError:
        where = f"{flat_key(path)}: " if path else ""
        found.problems.append(f"{where}{key!r} is not a name: it has a lone surrogate")
    if len(path) > MAX_DEPTH:
        raise UnsavableStateError(STATE, [f"{flat_key(path):.80} is nested deeper than {MAX_DEPTH} levels, or contains itself"])
    return (*path, str(key))


def walk(
    value: Any, path: Path_, *, rebuilt: bool = True, ordered: dict[Path_, list[str]] | None = None
) -> Iterator[tuple[Path_, Any]]:
    """Yield the leaves of nested dicts and lists, with the keys that lead to each; an int is a position in a list.

    Args:
        value: The nested containers.
        path: The keys that lead to it.
        rebuilt: Whether a load rebuilds the containers rather than filling the caller's own.
        ordered: A dict to fill with the keys of each OrderedDict that is split and rebuilt; if None, OrderedDicts stay whole.
    """
    if len(path) > MAX_DEPTH:
        raise UnsavableStateError(STATE, [f"{flat_key(path):.80} is nested deeper than {MAX_DEPTH} levels, or contains itself"])
    if not _is_open(value, rebuilt=rebuilt, ordered=ordered is not None):
        yield path, value
    elif isinstance(value, dict):
        if ordered is not None and type(value) is OrderedDict:
            ordered[path] = list(value)
        for key, item in value.items():
            yield from walk(item, (*path, str(key)), rebuilt=rebuilt, ordered=ordered)
    else:
        for index, item in enumerate(value):
            yield from walk(item, (*path, index), rebuilt=rebuilt, ordered=ordered)


def _is_open(value: Any, *, rebuilt: bool, ordered: bool = False, closed: set[int] | None = None) -> bool:
    """Return whether a dict or list is split; ``closed`` collects lists that are not, since a list may occur many times."""
    kind = type(value)
    if kind is dict or (kind is OrderedDict and (not rebuilt or (ordered and not lost_attributes(value)))):
        return bool(value) and all(type(key) is str or (type(key) is int and not rebuilt) for key in value)
    if kind is not list:
        return False
    closed = set() if closed is None else closed
    if id(value) in closed:
        return False
    closed.add(id(value))
    return any(is_tensor(item) or _is_open(item, rebuilt=rebuilt, ordered=ordered, closed=closed) for item in value)


def _add_object(found: Captured, path: Path_, state: Any, saving: bool) -> None:
    ordered: dict[Path_, list[str]] = {}
    for sub, value in walk(state, path, ordered=ordered):
        if is_sharded(value):
            found.sharded[flat_key(sub)] = value
        if saving:
            _add(found, sub, value, rebuilt=True, saving=True)
    if saving and ordered:
        orders = {sub[len(path) :]: keys for sub, keys in ordered.items()}
        _add(found, (*path, ORDER), orders, rebuilt=True, saving=True)


def _add(found: Captured, path: Path_, value: Any, *, rebuilt: bool, saving: bool) -> None:
    key, own = flat_key(path), found.is_own(path)
    if key in found.leaves:
        raise FQNMismatchError(STATE, unexpected=[f"{key} comes from two places"], advice="Rename one of them.")
    try:
        if not is_tensor(value):
            found.leaves[key] = Leaf(key, path, value=snapshot(value) if saving else value, own=own)
            return
        if rebuilt and saving and type(value) is not torch.Tensor and not is_sharded(value):
            snapshot(value)  # raises for a parameter or other subclass, which would come back as a plain tensor
        local = local_tensor(value)
    except UnsavableStateError as error:
        found.problems.extend(f"{key} {problem}" if not problem.startswith("[") else key + problem for problem in error.problems)
        return
    if own and not _is_whole(local):
        found.problems.append(f"{key} is sharded and in a PerRank: every rank would save a part. Take it out of the PerRank")
    shards = tuple((shard.offsets, shard.sizes, shard.data) for shard in local.shards)
    found.leaves[key] = Leaf(key, path, local.shape, local.dtype, shards, own=own)
    if local.replica_of is not None and not own:
        found.replicas[key] = local.replica_of


def _is_whole(local: LocalTensor) -> bool:
    return [shard.sizes for shard in local.shards] == [local.shape]
