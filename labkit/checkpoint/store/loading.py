"""A load that checks everything before it changes anything.

First, every rank compares keys in both directions, shapes, dtypes, coverage and hashes. Then each reads its own boxes straight from
the files, without collectives and without unpickling anything unsafe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from labkit.base.progress import task
from labkit.checkpoint.checks.findings import Gate
from labkit.checkpoint.checks.verification import check_loaded
from labkit.checkpoint.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DtypeNarrowingError,
    FQNMismatchError,
    IncompleteCheckpointError,
)
from labkit.checkpoint.index import manifest
from labkit.checkpoint.store.comm import Comm
from labkit.checkpoint.store.load_plan import LoadPlan, Problems

Check = Literal["full", "size", "none"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The outcome of a load.

    Attributes:
        path: The checkpoint's directory or file.
        step: Its step, in a store.
        num_tensors: Number of tensors read by all ranks together, each counted once.
        ignored: Keys that only the checkpoint or only the state has, and that ``ignore`` matched.
        checked: Whether file hashes were compared; False if the checkpoint has no manifest.
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
    despite: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load a checkpoint into a training state, in place.

    Args:
        path: A store (its newest complete step, or ``step``), or any checkpoint that :func:`open_checkpoint` reads.
        state: As for :func:`labkit.checkpoint.save`. Tensors and modules are filled in place. Optimizers get the saved state and
            groups. Other objects get their state through ``load_state_dict``. Plain values are replaced in their dicts by ones
            equal to the saved ones and of the same type (:mod:`labkit.checkpoint.pickles.values`). The containers themselves stay
            the caller's.
        step: The step of a store to load.
        ignore: Patterns (``optimizer.*``) of keys that may be missing or unexpected; their values in the state stay as they are.
        check: ``full`` first compares every file's hash with the manifest's, dividing the files among the ranks. Without a manifest
            it compares torch's own checksums while reading, so a load may then stop half way. ``size`` checks only sizes. ``none``
            does neither, and skips the checks of :func:`labkit.checkpoint.verify`.
        narrowing: Allow conversion to a dtype that cannot hold every value of the saved one; values that overflow are still
            refused.
        despite: Codes of errors of ``verify`` to accept (:data:`labkit.checkpoint.checks.findings.CODES`). For everything loaded,
            rank 0 checks the index, the moments and the lists of parameters, but neither single values nor NaN. ``unsafe`` has no
            effect here: pickles that ask for code are never read.
        group: The ranks that load; None for all ranks.

    Returns:
        Which checkpoint was loaded, and what was read from it.

    Raises:
        CheckpointNotFoundError: The store has no complete step, or not this one.
        FQNMismatchError: Keys are missing or unexpected.
        CheckpointMismatchError: A shape differs, even if it would broadcast.
        DtypeNarrowingError: A dtype cannot hold the saved values.
        IncompleteCheckpointError: A file is missing or cut off, or a region of a tensor is in no file.
        CorruptCheckpointError: A file's hash is not the manifest's.
        UnsafeCheckpointError: A pickle names something outside the allow-list.
        VerificationError: ``verify`` would find an error, and ``despite`` does not name it.
        In all these cases no rank's state has changed, with two exceptions that show only while reading: overflow under
        ``narrowing``, and damaged data in a checkpoint without a manifest.

    Ranks: collective; all ranks raise when one does. Blocks for reading the checkpoint once to check it and once to load.
    """
    comm = Comm(group)
    gate = comm.on_first(lambda: Gate.of(path, despite), path)
    root = comm.on_first(lambda: _resolve(Path(path), step), path)
    checked = _check_files(root, check, comm)
    plans = []
    comm.everywhere(lambda: plans.append(LoadPlan.make(root, state, ignore, narrowing, comm)), root)
    plan = plans[0]
    # Without a manifest, use torch's own checksums instead, which torch itself does not check.
    plan.checksums = check == "full" and not checked
    problems = comm.gather(plan.problems)
    _raise_problems(root, problems)
    if check != "none":
        gate.path = root
        plan.notes += comm.on_first(lambda: check_loaded(plan.reader, gate, without=plan.ignored), root)
    comm.everywhere(plan.execute, root)
    comm.everywhere(plan.finish, root)
    notes = tuple(plan.notes)
    return LoadReport(root, plan.checkpoint.step, len(plan.tensors), tuple(sorted(plan.ignored)), checked, notes)


def _resolve(path: Path, step: int | None) -> Path:
    if not path.exists():
        raise CheckpointNotFoundError(path, "there is no such file or directory")
    if not (path.is_dir() and manifest.is_store(path)):
        if step is not None:
            raise CheckpointNotFoundError(path, f"it is not a store of steps, so it has no step {step}")
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
        # Deal out files in order of size, the largest first, so that all ranks hash about the same number of bytes.
        names = sorted(found.files, key=lambda name: (-found.files[name].size, name))
        share = names[comm.rank :: comm.size]
        with task("check", sum(found.files[name].size for name in share)) as checking:
            for name in share:
                manifest.check_file(root, name, found.files[name], content=check == "full")
                checking.advance(found.files[name].size)
        return check == "full"

    return all(comm.everywhere(mine, root))


def _raise_problems(root: Path, everyone: Sequence[Problems]) -> None:
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
        raise IncompleteCheckpointError(root, "; ".join(gaps), advice="Nothing was loaded.")
