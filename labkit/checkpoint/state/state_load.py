"""Restoring of loaded values: nested dicts, values in place, and optimizers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.optim import Optimizer

from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.errors import FQNMismatchError
from labkit.checkpoint.index.model import Checkpoint, Path_, TensorEntry, ValueEntry
from labkit.checkpoint.index.names import flat_key, fqn_of
from labkit.checkpoint.state.modules import has_fsdp1, module_state
from labkit.checkpoint.state.optimizers import match_groups, parameter_names, state_like
from labkit.checkpoint.state.state import ORDER, PerRank


def nest(leaves: Mapping[Path_, Any], source: object) -> Any:
    """Build nested dicts and lists from leaves by path; integers in a path are list positions.

    The leaves may include the order of each OrderedDict, as :func:`labkit.checkpoint.state.state.capture` saves it.

    Raises:
        FQNMismatchError: A list's positions have gaps, so they were really int dict keys, in a file from another program.
    """
    if () in leaves:
        return leaves[()]
    _refuse_gaps(leaves, source)
    ordered = leaves.get((ORDER,), {})
    root: Any = [] if any(type(path[0]) is int for path in leaves) else {}
    for path, value in leaves.items():
        if path == (ORDER,):
            continue
        here: Any = root
        for index, step in enumerate(path[:-1]):
            follower: Any = [] if type(path[index + 1]) is int else {}
            here = _step_into(here, step, follower)
        _set(here, path[-1], value)
    for path in sorted(ordered, key=len, reverse=True):
        keys = ordered[path]
        if not path:
            return OrderedDict((key, root[key]) for key in keys)
        owner = _at(root, path[:-1])
        owner[path[-1]] = OrderedDict((key, owner[path[-1]][key]) for key in keys)
    return root


def _refuse_gaps(leaves: Mapping[Path_, Any], source: object) -> None:
    positions: dict[Path_, set[int]] = {}
    for path in leaves:
        for index, step in enumerate(path):
            if type(step) is int:
                positions.setdefault(path[:index], set()).add(step)
    problems = [
        f"{flat_key(path) or 'the state'} is numbered {', '.join(map(str, sorted(found)[:4]))}, which is not a list"
        for path, found in positions.items()
        if found != set(range(len(found)))
    ]
    if problems:
        raise FQNMismatchError(source, problems=problems, advice="Read it with labkit.checkpoint.Reader, and rebuild the dict.")


def _at(here: Any, path: Path_) -> Any:
    for step in path:
        here = here[step]
    return here


def _step_into(here: Any, step: Any, follower: Any) -> Any:
    if isinstance(here, list):
        _set(here, step, here[step] if step < len(here) and here[step] is not None else follower)
        return here[step]
    return here.setdefault(int(step) if isinstance(step, int) else step, follower)


def _set(here: Any, step: Any, value: Any) -> None:
    if isinstance(here, list):
        here.extend([None] * (step + 1 - len(here)))
    here[int(step) if isinstance(step, int) else step] = value


def key_of(container: Any, step: str | int) -> Any:
    """Return the dict key or list index for a part of a name; "3" means the int 3 if the dict has that key but no "3"."""
    if isinstance(container, list):
        return int(step)
    if step in container or not str(step).lstrip("-").isdecimal():
        return step
    return int(step) if int(step) in container else step


def put_value(state: Any, path: Path_, value: Any) -> None:
    """Replace the value at nested keys of a state, whether in a dict, a list or a :class:`PerRank`."""
    here = state
    for index, step in enumerate(path):
        last = index == len(path) - 1
        if isinstance(here, PerRank):
            if last:
                here.value = value
            here = here.value
            continue
        key = key_of(here, step)
        if last:
            here[key] = value
        else:
            here = here[key]


@dataclass
class OptimizerTarget:
    """An optimizer and the data to read for it.

    Attributes:
        optimizer: The optimizer.
        tensors: Flat key to the tensor that receives the piece, sharded like its parameter.
        keys: All keys of the checkpoint that belong to the optimizer.
        states: Each FQN's state: those tensors, and values that are not tensors.
        groups: The saved options for each of the optimizer's groups, in the optimizer's order.
        parameters: FQN to parameter.
    """

    optimizer: Optimizer
    module: nn.Module
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def apply(self) -> None:
        """Set the optimizer's state and options.

        Ranks: collective for FSDP1, else local.
        """
        if has_fsdp1(self.module):
            saved = {"state": self.states, "param_groups": self.groups}
            self.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(self.module, self.optimizer, saved))
            return
        self.optimizer.state.clear()
        for name, parameter in self.parameters.items():
            if name in self.states:
                self.optimizer.state[parameter] = self.states[name]
        for group, saved in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def keys_below(checkpoint: Checkpoint, path: Path_) -> list[str]:
    """Return the keys of a checkpoint's entries at or below a path."""
    entries: list[TensorEntry | ValueEntry] = [*checkpoint.tensors.values(), *checkpoint.values.values()]
    return [entry.key for entry in entries if entry.path[: len(path)] == path]


def optimizer_targets(path: Path_, optimizer: Optimizer, modules: Mapping[Path_, nn.Module], reader: Reader) -> OptimizerTarget:
    """Plan the loading of an optimizer: match groups and parameters by FQN, and allocate a tensor for each piece of state.

    The optimizer itself is not changed.

    Raises:
        FQNMismatchError: The checkpoint's groups or state do not match the optimizer's parameters.

    Ranks: collective for FSDP1, else local.
    """
    checkpoint = reader.checkpoint
    module = next(iter(modules.values()))
    target = OptimizerTarget(optimizer, module)
    target.keys = set(keys_below(checkpoint, path))
    saved = _saved_groups(reader, path, target.keys)
    names = parameter_names(optimizer, modules)
    target.parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    if has_fsdp1(module):
        # Flat parameters have no FQN of their own; FSDP matches groups itself, by the names of the parameters in them.
        _fsdp1_targets(target, path, optimizer, modules, reader)
        target.groups = saved
        return target
    target.groups = match_groups(optimizer, names, saved, checkpoint.path)
    groups = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    strangers = set()
    states: dict[str, dict[Path_, Any]] = {}
    for key in sorted(target.keys):
        entry = checkpoint.tensors.get(key) or checkpoint.values[key]
        split = _state_key(entry.path[len(path) :], target.parameters)
        if split is None:
            continue
        name, piece = split
        if name not in target.parameters:
            strangers.add(name)
            continue
        state = states.setdefault(name, {})
        if key in checkpoint.values:
            state[piece] = reader.value(key)
        else:
            tensor = checkpoint.tensors[key]
            made = state_like(target.parameters[name], tensor.shape, tensor.dtype, str(piece[-1]), groups[name])
            state[piece] = target.tensors[key] = made
    target.states = {name: nest(state, checkpoint.path) for name, state in states.items()}
    if strangers:
        raise FQNMismatchError(checkpoint.path, unexpected=[f"optimizer state of {name}" for name in sorted(strangers)])
    return target


def _fsdp1_targets(
    target: OptimizerTarget, path: Path_, optimizer: Optimizer, modules: Mapping[Path_, nn.Module], reader: Reader
) -> None:
    known = {fqn(name) for module in modules.values() for fqn in [fqn_of(module)] for name, _ in module.named_parameters()}
    shards = _fsdp1_shapes(modules)
    for key in sorted(target.keys):
        entry = reader.checkpoint.tensors.get(key) or reader.checkpoint.values[key]
        split = _state_key(entry.path[len(path) :], ())
        if split is None:
            continue
        name, piece = split[0], str(split[1][-1])
        if name not in shards and name not in known:
            raise FQNMismatchError(reader.checkpoint.path, unexpected=[f"optimizer state of {name}"])
        state = target.states.setdefault(name, {})
        if key in reader.checkpoint.values:
            state[piece] = reader.value(key)
            continue
        tensor = reader.checkpoint.tensors[key]
        # FSDP1 needs whole tensors even for sharded optimizer state, and splits them itself.
        state[piece] = target.tensors[key] = torch.empty(tensor.shape, dtype=tensor.dtype)


def _fsdp1_shapes(modules: Mapping[Path_, nn.Module]) -> set[str]:
    return {name for module in modules.values() for name in module_state(module)}


def _state_key(rest: Path_, names: Container[str | int]) -> tuple[str, Path_] | None:
    """Split the keys below an optimizer into FQN and piece: ``("state", "block.0.weight", "exp_avg")``.

    A piece may be nested (LBFGS has lists of tensors) if the FQN is a single key and the name of a parameter.
    """
    if len(rest) < 3 or rest[0] != "state":
        return None
    if rest[1] in names:
        return str(rest[1]), rest[2:]
    return ".".join(map(str, rest[1:-1])), (str(rest[-1]),)


def _saved_groups(reader: Reader, path: Path_, keys: set[str]) -> list[dict[str, Any]]:
    checkpoint = reader.checkpoint
    leaves: dict[Path_, Any] = {}
    for key in keys:
        entry = checkpoint.values.get(key) or checkpoint.tensors[key]
        rest = entry.path[len(path) :]
        if rest and rest[0] == "param_groups":
            leaves[rest] = reader.value(key) if key in checkpoint.values else reader.tensor(key)
    groups = nest(leaves, checkpoint.path).get("param_groups", [])
    wrong = [
        group for group in groups if not isinstance(group, dict) or not all(isinstance(n, str) for n in group.get("params", [None]))
    ]
    if not groups or wrong:
        raise FQNMismatchError(
            checkpoint.path,
            unexpected=[f"{flat_key(path)}.param_groups without parameter names"],
            advice="State that is numbered by position cannot be told apart when parameters are reordered. "
            "Use `labkit checkpoint migrate` with the model to name it.",
        )
    return groups  # type: ignore[no-any-return]
