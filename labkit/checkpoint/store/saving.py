"""A save that cannot lose the last good checkpoint.

Anything that a load would not restore unchanged is refused before anything is written. DCP writes each step into its own directory.
After every rank has read back its files and their values, rank 0 publishes ``manifest.json`` by an atomic rename. Only then is the
step complete, and only then are older steps removed. Whenever it crashes, a save leaves earlier steps unchanged and at worst a
directory without a manifest.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from labkit.base.plain_text import name_ranks
from labkit.base.progress import task
from labkit.checkpoint.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError
from labkit.checkpoint.files.plain_tensors import to_cpu
from labkit.checkpoint.index import manifest
from labkit.checkpoint.index.manifest import FileSum, Manifest
from labkit.checkpoint.pickles.values import snapshot
from labkit.checkpoint.state.state import Captured, capture
from labkit.checkpoint.store.comm import Comm
from labkit.checkpoint.store.divergence import refuse_divergence
from labkit.checkpoint.store.host_memory import HostMemory
from labkit.checkpoint.store.store_folder import StoreFolder
from labkit.checkpoint.write.dcp_writer import DirectoryWriter, Leaf, LeafPlanner


def save(
    store: str | Path,
    state: Mapping[str, Any],
    step: int,
    *,
    keep: int | None = None,
    threads: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a training state as a step of a store.

    A load returns everything that is accepted here, equal and of the same type: :mod:`labkit.checkpoint.pickles.values` lists the
    values, and :mod:`labkit.checkpoint.state.state` explains how nested dicts and lists become names. Everything else is refused
    before anything is written. Before the step is published and older steps are removed, each rank reads back what it wrote, as a
    load would.

    Args:
        store: A directory that all ranks see; created if needed.
        state: Nested dicts of modules, optimizers, objects with ``state_dict``, tensors, DTensors, plain values, and
            :class:`labkit.checkpoint.PerRank` for each rank's own values. Optimizer state is saved by FQN, so the module that an
            optimizer trains must be in the state too. Schedulers and counters need entries of their own.
        step: The training step; step 10 goes into the directory ``step_00000010``.
        keep: After publishing, keep the newest ``keep`` complete steps; remove older ones, and what unfinished saves of earlier
            steps left. Steps that are links or another user's stay, and do not count. None removes nothing.
        threads: Files that each rank writes at the same time.
        group: The ranks that save; None for all of them. Without a process group, this process saves alone.

    Returns:
        The step's directory. It is a DCP checkpoint with a manifest.

    Raises:
        CheckpointExistsError: The step is already complete, or its path is taken by something that is another user's or not a
        directory. RankDivergenceError: Ranks hold different values under one key that is not per rank. UnsavableStateError: A value
        or a tensor would not be restored unchanged; the message names all of them, each with advice. FQNMismatchError: Names
        collide, or an optimizer holds no parameter of a module in the state. CheckpointWriteError: A rank could not write, or its
        files do not read back. All ranks raise it, and the step is not
            published.

    Ranks: collective. Blocks until every rank's files are on disk and read back.
    """
    comm = Comm(group)
    captured = _capture(state, comm)
    return _Save(Path(store), step, captured, comm, keep=keep, threads=threads).run()


class PendingSave:
    """An asynchronous save in progress.

    Attributes:
        step: The step that is being saved.
    """

    def __init__(self, work: _Save) -> None:
        self.step = work.step
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._collected = False
        # Not a daemon thread, so that a process that ends normally finishes its save first.
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"labkit-save-{work.step}")
        self._thread.start()

    def _run(self, work: _Save) -> None:
        try:
            self._path = work.run()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Return whether the save has ended, whether or not it succeeded."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait for the save and return the step's directory.

        Raises:
            TimeoutError: It is still running after ``timeout_s`` seconds.
            CheckpointError: The save failed; the step is then not published.

        Ranks: local, but the save itself is collective, so every rank should wait at the same point of the program.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the save of step {self.step} is still running")
        self._collected = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path


_pending: PendingSave | None = None
_host_memory = HostMemory()
_groups: dict[int, dist.ProcessGroup] = {}


def save_async(store: str | Path, state: Mapping[str, Any], step: int, *, keep: int | None = None, threads: int = 1) -> PendingSave:
    """Save in the background: copy everything to CPU memory, return, and write from a thread.

    GPU tensors are copied into page-locked memory, which is kept for the next save, so host memory as large as this rank's share
    stays allocated. The first save takes longer, because it locks that memory.

    Later changes to the tensors do not affect the checkpoint. Only one save runs at a time: a second call first waits for the
    previous save, and raises its error unless ``wait()`` has already done so. The arguments are those of :func:`save`. All ranks of
    the default group take part, over a separate gloo group.

    Returns:
        The pending save. Call ``wait()`` before you rely on it: the step counts only once it is published.

    Raises:
        CheckpointError: As :func:`save`, for errors found before writing begins; or the previous save failed.

    Ranks: collective. Blocks until a save that is still running has ended, and for the copy to CPU memory.
    """
    global _pending
    previous, _pending = _pending, None
    if previous is not None and not previous._collected:
        previous.wait()
    comm = Comm(_own_group())
    captured = _capture(state, comm)
    _host_memory.begin()
    staged = replace(captured, leaves={key: _stage(leaf) for key, leaf in captured.leaves.items()})
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    _pending = PendingSave(_Save(Path(store), step, staged, comm, keep=keep, threads=threads))
    return _pending


def _own_group() -> dist.ProcessGroup | None:
    """Return a gloo group for the background thread, because two threads must not use the same group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    default = dist.distributed_c10d._get_default_group()
    if id(default) not in _groups:
        _groups.clear()
        _groups[id(default)] = dist.new_group(backend="gloo")
    return _groups[id(default)]


def _stage(leaf: Leaf) -> Leaf:
    shards = tuple((offsets, sizes, _staged(data)) for offsets, sizes, data in leaf.shards)
    return replace(leaf, shards=shards, value=snapshot(leaf.value, copy=True))


def _staged(data: torch.Tensor) -> torch.Tensor:
    return _host_memory.copy(data) if data.device.type == "cuda" else to_cpu(data, copy=True)


def _capture(state: Mapping[str, Any], comm: Comm) -> Captured:
    captured: list[Captured] = []
    # capture() is collective for FSDP1. If only one rank fails there, the others wait until the group times out, as in FSDP1.
    comm.everywhere(lambda: captured.append(capture(state, comm.rank)), "the state")
    refuse_divergence(captured[0], comm)
    return captured[0]


class _Save:
    """One save, from making the directory to removing old steps."""

    def __init__(self, store: Path, step: int, captured: Captured, comm: Comm, *, keep: int | None, threads: int) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} would remove the checkpoint that was just written; use 1 or more")
        self.store, self.step, self.captured, self.comm = store, step, captured, comm
        self.keep, self.threads = keep, threads
        self.directory = manifest.step_directory(store, step)
        self.folder: StoreFolder | None = None

    def run(self) -> Path:
        try:
            return self._run()
        finally:
            if self.folder is not None:
                self.folder.close()

    def _run(self) -> Path:
        self.comm.on_first(self._prepare, self.directory)
        try:
            self._write_and_publish()
        except CheckpointError:
            # Every rank raises the same error here, so none is still writing. The unfinished step never counted, and its space may
            # be needed if the disk is full.
            if self.folder is not None:
                self.folder.remove(self.directory.name, only_unfinished=True)
            raise
        if self.keep is not None:
            self.comm.on_first(self._retain, self.directory)
        return self.directory

    def _write_and_publish(self) -> None:
        mine = sum(data.nbytes for leaf in self.captured.leaves.values() for _, _, data in leaf.shards)
        with task(f"save step {self.step}", mine) as writing:
            writer = DirectoryWriter(self.directory, threads=self.threads, progress=writing.advance)
            self._write(writer)
        # DCP writes .metadata on rank 0 only after every rank has written, so all data files exist by then.
        sums = self.comm.everywhere(lambda: self._read_back(writer), self.directory)
        self.comm.on_first(lambda: self._publish(sums), self.directory)

    def _prepare(self) -> None:
        if (self.directory / manifest.MANIFEST_FILE).exists():
            raise CheckpointExistsError(
                self.directory, f"step {self.step} already exists and is complete. Save another step, or remove this one."
            )
        self.folder = StoreFolder(self.store)
        self.folder.make_step(self.directory.name)
        manifest.sync_directory(self.store)

    def _write(self, writer: DirectoryWriter) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable|uninitialized)")
                dcp.save(
                    {},
                    storage_writer=writer,
                    planner=LeafPlanner(self.captured.leaves),
                    process_group=self.comm.group,
                    no_dist=not self.comm.active,
                )
        except CheckpointException as error:  # derives from BaseException, so "except Exception" misses it
            missing = [rank for rank, failure in error.failures.items() if isinstance(failure[0], FileNotFoundError)]
            unseen = [] if 0 in missing else missing
            where = (
                f" Rank 0 has made it, but {name_ranks(unseen)} cannot see it: all need one directory that their machines share."
            )
            raise CheckpointWriteError(
                self.directory,
                f"{_causes(error)}.{where if unseen else ''} The step is not published; earlier steps are untouched.",
            ) from error

    def _read_back(self, writer: DirectoryWriter) -> dict[str, FileSum]:
        with task(f"read back step {self.step}", sum(written.size for written in writer.sums.values())) as reading:
            writer.read_back(self.captured.leaves, reading.advance)
        return dict(writer.sums)

    def _publish(self, sums: list[dict[str, FileSum]]) -> None:
        files = {name: total for part in sums for name, total in part.items()}
        about = {"torch": torch.__version__, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        manifest.publish(self.directory, Manifest(files, self.step, self.comm.size, about))

    def _retain(self) -> None:
        assert self.keep is not None
        assert self.folder is not None
        self.folder.retain(self.keep, newest=self.step)


def _causes(error: CheckpointException) -> str:
    # A failure is a pair of the exception and its traceback.
    causes = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items()) or str(error)
