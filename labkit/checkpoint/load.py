"""A load that checks everything before it changes anything.

Keys in both directions, shapes, dtypes, coverage and hashes are compared first, on every rank; then each rank reads the
boxes that it holds, straight from the files, without a collective and without unpickling anything.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from labkit.checkpoint import manifest
from labkit.checkpoint.catalog import open_checkpoint
from labkit.checkpoint.coverage import coverage
from labkit.checkpoint.dtypes import convert, is_lossless
from labkit.checkpoint.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DtypeNarrowingError,
    FQNMismatchError,
    IncompleteCheckpointError,
)
from labkit.checkpoint.model import Checkpoint, Path_, TensorEntry
from labkit.checkpoint.ranks import Comm
from labkit.checkpoint.read import Reader
from labkit.checkpoint.shards import is_tensor, local_tensor
from labkit.checkpoint.state import Captured, PerRank, capture, flat_key, load_module_state, module_state
from labkit.checkpoint.state_load import OptimizerTarget, nest, optimizer_targets, put_value
from labkit.progress import task

Check = Literal["full", "size", "none"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    Attributes:
        path: The checkpoint's directory or file.
        step: Its step, in a store.
        num_tensors: Tensors read, on all ranks together each once.
        ignored: Keys that the checkpoint or the state has alone and that ``ignore`` covered.
        checked: Whether file hashes were compared; False also when the checkpoint has no manifest.
        notes: Sentences about anything else worth knowing.
    """

    path: Path
    step: int | None
    num_tensors: int
    ignored: tuple[str, ...] = ()
    checked: bool = False
    notes: tuple[str, ...] = ()


def load(
    path: str | Path,
    state: dict[str, Any],
    *,
    step: int | None = None,
    ignore: Sequence[str] = (),
    check: Check = "full",
    narrowing: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a training state, in place.

    Args:
        path: A store (its newest complete step, or ``step``), or any checkpoint that :func:`open_checkpoint` reads.
        state: As for :func:`labkit.checkpoint.save`. Tensors and modules are filled in place; optimizers get the saved
            state and groups; objects with ``load_state_dict`` are called; other values are replaced in their dicts.
        step: Which step of a store.
        ignore: Patterns (``optimizer.*``) of keys that may be missing or unexpected; they are left as they are.
        check: ``full`` compares every file with the manifest's hashes first, shared out over the ranks; without a manifest
            it compares torch's own checksums while reading, so then a load can stop half way. ``size`` looks at sizes
            only; ``none`` does neither.
        narrowing: Allow conversions to a dtype that cannot hold every value of the saved one. Values that overflow are
            still refused.
        group: The ranks that load; None for all of them.

    Returns:
        What was loaded, from where.

    Raises:
        CheckpointNotFoundError: The store has no complete step, or not this one.
        FQNMismatchError: Keys are missing or unexpected.
        CheckpointMismatchError: A shape differs, also where it would broadcast.
        DtypeNarrowingError: A dtype cannot hold the saved values.
        IncompleteCheckpointError: A file is missing or cut off, or a region of a tensor is in no file.
        CorruptCheckpointError: A file's hash is not the manifest's.
        UnsafeCheckpointError: A pickle names something outside the allow-list.
        In all these cases nothing in the state has changed, on any rank; except overflow under ``narrowing``, and damaged
        data in a checkpoint without a manifest, which show only while reading.

    Ranks: collective; all ranks raise when one does. Blocks for reading the checkpoint once to check it and once to load.
    """
    comm = Comm(group)
    root = comm.on_first(lambda: _resolve(Path(path), step), path)
    checked = _check_files(root, check, comm)
    plans = []
    comm.everywhere(lambda: plans.append(_Plan.make(root, state, ignore, narrowing, comm)), root)
    plan = plans[0]
    # Without a manifest, torch's own checksums, which torch does not look at, are the next best thing.
    plan.checksums = check == "full" and not checked
    problems = comm.gather(plan.problems)
    _raise(root, problems)
    comm.everywhere(plan.execute, root)
    comm.everywhere(plan.finish, root)
    notes = tuple(plan.notes)
    return LoadReport(root, plan.checkpoint.step, len(plan.tensors), tuple(sorted(plan.ignored)), checked, notes)


def _resolve(path: Path, step: int | None) -> Path:
    if not path.exists():
        raise CheckpointNotFoundError(path, "there is no such file or directory")
    if not (path.is_dir() and manifest.is_store(path)):
        if step is not None:
            raise CheckpointNotFoundError(path, f"it is no store of steps, so it has no step {step}")
        return path
    if step is None:
        return manifest.latest(path)
    directory = manifest.step_directory(path, step)
    if not (directory / manifest.MANIFEST_FILE).is_file():
        have = ", ".join(map(str, manifest.complete_steps(path))) or "none"
        raise CheckpointNotFoundError(directory, f"step {step} is not there, or is unfinished. Complete steps: {have}")
    return directory


def _check_files(root: Path, check: Check, comm: Comm) -> bool:
    if check == "none":
        return False

    def mine() -> bool:
        found = manifest.read(root) if root.is_dir() else None
        if found is None:
            return False
        # The largest files first, dealt out like cards: each rank hashes about the same number of bytes.
        names = sorted(found.files, key=lambda name: (-found.files[name].size, name))
        share = names[comm.rank :: comm.size]
        with task("check", sum(found.files[name].size for name in share)) as checking:
            for name in share:
                manifest.check_file(root, name, found.files[name], content=check == "full")
                checking.advance(found.files[name].size)
        return check == "full"

    return all(comm.everywhere(mine, root))


@dataclass
class Problems:
    """What one rank found that does not fit."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)


def _raise(root: Path, everyone: Sequence[Problems]) -> None:
    def union(pick: Callable[[Problems], Iterable[str]]) -> list[str]:
        return list(dict.fromkeys(text for problems in everyone for text in pick(problems)))

    missing, unexpected = union(lambda p: p.missing), union(lambda p: p.unexpected)
    if missing or unexpected:
        raise FQNMismatchError(
            root,
            missing=missing,
            unexpected=unexpected,
            advice="Nothing was loaded. Fix the names, or pass ignore=[...] for what may differ.",
        )
    if shapes := union(lambda p: p.shapes):
        raise CheckpointMismatchError(root, shapes, advice="Nothing was loaded.")
    if dtypes := union(lambda p: p.dtypes):
        raise DtypeNarrowingError(
            root, dtypes, advice="Nothing was loaded. Pass narrowing=True to convert; overflow is still refused."
        )
    if gaps := union(lambda p: p.gaps):
        raise IncompleteCheckpointError(root, "; ".join(gaps) + ". Nothing was loaded.")


@dataclass
class _Plan:
    """Everything one rank is going to read, and what stands in the way."""

    checkpoint: Checkpoint
    state: dict[str, Any]
    captured: Captured
    ignore: Sequence[str]
    narrowing: bool
    comm: Comm
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
    def make(cls, root: Path, state: dict[str, Any], ignore: Sequence[str], narrowing: bool, comm: Comm) -> _Plan:
        plan = cls(open_checkpoint(root), state, capture(state, comm.rank, optimizers=False), ignore, narrowing, comm)
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
        other = key in self.checkpoint.tensors or key in self.checkpoint.values
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
                self._want(flat_key((*path, name)), value if is_tensor(value) else None, taken)

    def _plan_optimizers(self, taken: set[str]) -> None:
        for path, optimizer in self.captured.optimizers.items():
            prefix = flat_key(path) + "."
            if not any(key.startswith(prefix) for key in (*self.checkpoint.tensors, *self.checkpoint.values)):
                if not self._ignores(prefix + "state"):
                    self.problems.missing.append(prefix + "*")
                continue
            with Reader(self.checkpoint) as reader:
                target = optimizer_targets(path, optimizer, self.captured.modules, reader)
            self.optimizers.append(target)
            for key, tensor in target.tensors.items():
                self._want(key, tensor, taken)
            taken.update(target.keys)

    def _plan_objects(self, taken: set[str]) -> None:
        for path in self.captured.objects:
            prefix = flat_key(path) + "."
            keys = [key for key in (*self.checkpoint.tensors, *self.checkpoint.values) if key.startswith(prefix)]
            if not keys and not self._ignores(prefix + "state"):
                self.problems.missing.append(self._per_rank_text(prefix + "*", path))
            self.objects[path] = keys
            taken.update(keys)

    def _per_rank_text(self, key: str, path: Path_) -> str:
        for per_rank in self.captured.per_rank:
            if path[: len(per_rank)] == per_rank:
                return f"{key} (saved per rank, and not by a rank {self.comm.rank})"
        return key

    def _plan_rest(self, taken: set[str]) -> None:
        for key, leaf in self.captured.leaves.items():
            inside = any(leaf.path[: len(path)] == path for path in (*self.captured.modules, *self.captured.objects))
            if not inside:
                target = find(self.state, leaf.path, self.comm.rank)
                self._want(key, target if is_tensor(target) else None, taken)

    def _plan_unexpected(self, taken: set[str]) -> None:
        ranks = [f"{flat_key(path)}.rank_" for path in self.captured.per_rank]
        for key in (*self.checkpoint.tensors, *self.checkpoint.values):
            if key in taken or any(key.startswith(prefix) for prefix in ranks):
                continue
            if not self._ignores(key):
                self.problems.unexpected.append(key)

    def execute(self) -> None:
        """Read every planned box into its live tensor."""
        with Reader(self.checkpoint, checksums=self.checksums) as reader:
            read = {key: reader.value(key) for key in self.values}
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

    def _read_object(self, reader: Reader, path: Path_, keys: Sequence[str]) -> dict[str, Any]:
        leaves: dict[Path_, Any] = {}
        for key in keys:
            entry = self.checkpoint.tensors.get(key)
            if entry is not None:
                leaves[entry.path[len(path) :]] = reader.tensor(key)
            else:
                leaves[self.checkpoint.values[key].path[len(path) :]] = reader.value(key)
        return nest(leaves)

    def _place(self, key: str, value: Any) -> None:
        leaf = self.captured.leaves[key]
        for path, state in self.modules.items():
            if leaf.path[: len(path)] == path:
                state[key.removeprefix(flat_key(path) + ".")] = value
                return
        put_value(self.state, leaf.path, value)

    def finish(self) -> None:
        """What only works once the tensors are there: FSDP1's own loading, extra state, optimizers."""
        for path, state in self.modules.items():
            load_module_state(self.captured.modules[path], state)
        for target in self.optimizers:
            target.apply()


def find(state: Any, path: Path_, rank: int) -> Any:
    """The value at nested keys of a state; a :class:`PerRank` is stepped into."""
    value = state
    for step in path:
        if isinstance(value, PerRank):
            if step != f"rank_{rank}":
                return None
            value = value.value
            continue
        if isinstance(value, Mapping):
            by_text = {str(key): item for key, item in value.items()}
            value = by_text[str(step)]
        else:
            value = value[int(step)]
    return value.value if isinstance(value, PerRank) else value
