"""A plan of what one rank will read into its training state, or the problems that prevent it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from labkit.base.progress import task
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.dtypes import convert, is_lossless
from labkit.checkpoint.errors import DtypeNarrowingError
from labkit.checkpoint.formats.catalog import open_checkpoint
from labkit.checkpoint.index.coverage import coverage
from labkit.checkpoint.index.model import Checkpoint, Path_, TensorEntry, ValueEntry, unsupported
from labkit.checkpoint.index.names import flat_key
from labkit.checkpoint.state.modules import is_extra_state, load_module_state, module_state
from labkit.checkpoint.state.shards import is_tensor, local_tensor
from labkit.checkpoint.state.state import Captured, PerRank, capture
from labkit.checkpoint.state.state_load import OptimizerTarget, key_of, keys_below, nest, optimizer_targets, put_value
from labkit.checkpoint.store.comm import Comm


@dataclass
class Problems:
    """Mismatches that one rank found."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)


@dataclass
class LoadPlan:
    """Everything that one rank will read, and the problems that prevent it."""

    checkpoint: Checkpoint
    state: dict[str, Any]
    captured: Captured
    ignore: Sequence[str]
    narrowing: bool
    comm: Comm
    reader: Reader
    checksums: bool = False
    problems: Problems = field(default_factory=Problems)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    modules: dict[Path_, dict[str, Any]] = field(default_factory=dict)
    optimizers: list[OptimizerTarget] = field(default_factory=list)
    objects: dict[Path_, list[str]] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, root: Path, state: dict[str, Any], ignore: Sequence[str], narrowing: bool, comm: Comm) -> LoadPlan:
        """Compare a checkpoint with a training state; mismatches are in ``problems``. Ranks: collective for FSDP1."""
        checkpoint = open_checkpoint(root)
        captured = capture(state, comm.rank, saving=False)
        plan = cls(checkpoint, state, captured, ignore, narrowing, comm, Reader(checkpoint), notes=list(checkpoint.notes))
        taken: set[str] = set()
        plan._plan_modules(taken)
        plan._plan_optimizers(taken)
        plan._plan_objects(taken)
        plan._plan_rest(taken)
        plan._plan_unexpected(taken)
        return plan

    def _ignores(self, key: str) -> bool:
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in self.ignore):
            self.ignored.add(key)
            return True
        return False

    def _want(self, key: str, target: torch.Tensor | None, taken: set[str]) -> None:
        """Plan one leaf: a tensor to fill, or a value to read."""
        taken.add(key)
        entry = self.checkpoint.tensors.get(key)
        if target is None and key in self.checkpoint.values:
            self.values.append(key)
        elif entry is None or target is None:
            if not self._ignores(key):
                self.problems.missing.append(self._missing_text(key))
        elif self._fits(entry, target):
            self.tensors[key] = target

    def _missing_text(self, key: str) -> str:
        value = self.checkpoint.values.get(key)
        what = None if value is None else unsupported(value)
        if what is not None:
            return f"{key} (not supported: {what})"
        other = key in self.checkpoint.tensors or value is not None
        return (
            f"{key} (the checkpoint has a {'tensor' if key in self.checkpoint.tensors else 'value'} of that name)" if other else key
        )

    def _fits(self, entry: TensorEntry, target: torch.Tensor) -> bool:
        shape = tuple(target.size())
        if shape != entry.shape:
            self.problems.shapes.append(f"{entry.key} has shape {entry.shape} in the checkpoint and {shape} here")
            return False
        if not self.narrowing and not is_lossless(entry.dtype, target.dtype):
            self.problems.dtypes.append(f"{entry.key} is {entry.dtype} in the checkpoint and {target.dtype} here")
            return False
        found = coverage(entry.chunks, entry.shape)
        if not found.exact:
            where = f", for example offsets {found.gap[0]}, sizes {found.gap[1]}" if found.gap else ""
            self.problems.gaps.append(
                f"the chunks of {entry.key!r} leave {found.missing} elements out and hold {found.doubled} twice{where}"
            )
            return False
        return True

    def _plan_modules(self, taken: set[str]) -> None:
        for path, module in self.captured.modules.items():
            self.modules[path] = module_state(module)
            for name, value in self.modules[path].items():
                key = flat_key((*path, name))
                if is_extra_state(name) and key in self.checkpoint.tensors:
                    self.values.append(key)  # passed on whole, whatever shape it has here
                    taken.add(key)
                    continue
                self._want(key, value if is_tensor(value) and not is_extra_state(name) else None, taken)

    def _plan_optimizers(self, taken: set[str]) -> None:
        for path, optimizer in self.captured.optimizers.items():
            if not keys_below(self.checkpoint, path):
                prefix = flat_key(path) + "."
                if not self._ignores(prefix + "state"):
                    self.problems.missing.append(prefix + "*")
                continue
            with self.reader.fork() as reader:
                target = optimizer_targets(path, optimizer, self.captured.modules, reader)
            self.optimizers.append(target)
            for key, tensor in target.tensors.items():
                self._want(key, tensor, taken)
            taken.update(target.keys)

    def _plan_objects(self, taken: set[str]) -> None:
        for path in self.captured.objects:
            keys = keys_below(self.checkpoint, path)
            if not keys and not self._ignores(flat_key(path) + ".state"):
                self.problems.missing.append(self._per_rank_text(flat_key(path) + ".*", path))
            for key in keys:
                if key in self.captured.sharded and key in self.checkpoint.tensors:
                    self._want(key, self.captured.sharded[key], taken)
            self.objects[path] = keys
            taken.update(keys)

    def _per_rank_text(self, key: str, path: Path_) -> str:
        for per_rank in self.captured.per_rank:
            if path[: len(per_rank)] == per_rank:
                return f"{key} (saved per rank, but not by rank {self.comm.rank})"
        return key

    def _plan_rest(self, taken: set[str]) -> None:
        for key, leaf in self.captured.leaves.items():
            inside = any(leaf.path[: len(path)] == path for path in self.captured.modules)
            if not inside:
                target = find(self.state, leaf.path, self.comm.rank)
                self._want(key, target if is_tensor(target) else None, taken)

    def _plan_unexpected(self, taken: set[str]) -> None:
        entries: list[TensorEntry | ValueEntry] = [*self.checkpoint.tensors.values(), *self.checkpoint.values.values()]
        for entry in entries:
            if entry.key not in taken and not self._is_other_ranks(entry.path) and not self._ignores(entry.key):
                self.problems.unexpected.append(entry.key)

    def _is_other_ranks(self, path: Path_) -> bool:
        prefixes = [prefix for prefix in self.captured.per_rank if path[: len(prefix)] == prefix != path]
        return any(re.fullmatch(r"rank_\d+", str(path[len(prefix)])) for prefix in prefixes)

    def execute(self) -> None:
        """Read every planned box into its live tensor."""
        with self.reader.fork(checksums=self.checksums) as reader:
            read = {key: reader.value(key) if key in self.checkpoint.values else reader.tensor(key) for key in self.values}
            objects = {path: self._read_object(reader, path, keys) for path, keys in self.objects.items() if keys}
            sizes = {key: sum(shard.data.nbytes for shard in local_tensor(target).shards) for key, target in self.tensors.items()}
            with task("load", sum(sizes.values())) as reading:
                for key, target in self.tensors.items():
                    self._fill(reader, key, target)
                    reading.advance(sizes[key])
        for key, value in read.items():
            self._place(key, value)
        for path, value in objects.items():
            self.captured.objects[path].load_state_dict(value)

    def _fill(self, reader: Reader, key: str, target: torch.Tensor) -> None:
        entry = self.checkpoint.tensors[key]
        for shard in local_tensor(target).shards:
            data = reader.box(entry, shard.offsets, shard.sizes)
            converted, lost = convert(data, shard.data.dtype)
            if lost is not None:
                raise DtypeNarrowingError(
                    self.checkpoint.path, [f"{key}: {lost}"], advice="Tensors before this one are loaded already."
                )
            with torch.no_grad():
                shard.data.copy_(converted)

    def _read_object(self, reader: Reader, path: Path_, keys: Sequence[str]) -> Any:
        leaves: dict[Path_, Any] = {}
        for key in keys:
            entry = self.checkpoint.tensors.get(key)
            if entry is not None:
                live = self.tensors.get(key)  # a sharded tensor, about to be filled
                leaves[entry.path[len(path) :]] = reader.tensor(key) if live is None else live
            else:
                leaves[self.checkpoint.values[key].path[len(path) :]] = reader.value(key)
        return nest(leaves, self.checkpoint.path)

    def _place(self, key: str, value: Any) -> None:
        leaf = self.captured.leaves[key]
        for path, state in self.modules.items():
            if leaf.path[: len(path)] == path:
                state[key.removeprefix(flat_key(path) + ".")] = value
                return
        put_value(self.state, leaf.path, value)

    def finish(self) -> None:
        """Finish what needs the loaded tensors: FSDP1's own loading, extra state, optimizers."""
        for path, state in self.modules.items():
            load_module_state(self.captured.modules[path], state)
        for target in self.optimizers:
            target.apply()


def find(state: Any, path: Path_, rank: int) -> Any:
    """Return the value at nested keys of a state, even inside a :class:`PerRank`; None if it belongs to another rank."""
    value = state
    for step in path:
        if isinstance(value, PerRank):
            if step != f"rank_{rank}":
                return None
            value = value.value
            continue
        value = value[key_of(value, step)]
    return value.value if isinstance(value, PerRank) else value
