"""Execution of a writer: several files at once within a memory budget, each read back before it counts as written."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from labkit.checkpoint.checks import verification
from labkit.checkpoint.checks.findings import Finding, Gate, way_on
from labkit.checkpoint.contents.sources import origin
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError, CorruptCheckpointError
from labkit.checkpoint.files.plain_files import FileState
from labkit.checkpoint.formats.source_files import changed, states_of
from labkit.checkpoint.index import manifest
from labkit.checkpoint.index.coverage import coverage
from labkit.checkpoint.index.manifest import FileSum, Manifest
from labkit.checkpoint.index.model import Checkpoint
from labkit.checkpoint.write.out_files import OutFile, Writer, Written
from labkit.checkpoint.write.staging_area import StagingArea

_EXTRA_BYTES = 1 << 26
Progress = Callable[[int], None]


class Budget:
    """A limit on the tensor data in memory at once, over all threads.

    A request larger than the whole budget is granted when nothing else is held.
    """

    def __init__(self, total: int) -> None:
        self._total, self._held = total, 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Wait until ``size`` bytes are available, and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: self._held == 0 or self._held + size <= self._total)
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()


@dataclass(frozen=True)
class Result:
    """The outcome of a migration or reshard.

    Attributes:
        path: The destination.
        size_bytes: Tensor bytes in it.
        num_tensors, num_files: Counts.
        notes: Sentences about decisions made on the way.
        accepted: Errors of the source or the destination that the caller accepted with ``despite``.
    """

    path: Path
    size_bytes: int
    num_tensors: int
    num_files: int
    notes: tuple[str, ...] = ()
    accepted: tuple[Finding, ...] = ()


def check_destination(source: Path, destination: Path) -> None:
    """Raise :class:`CheckpointExistsError` if the destination exists, :class:`CheckpointError` if it is inside the source."""
    if os.path.lexists(destination):
        raise CheckpointExistsError(destination, "the destination exists. Choose another one, or remove it.")
    if source.is_dir() and destination.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(
            f"{destination} is inside {source}, but a source is only read. Choose a destination beside it or elsewhere."
        )


def open_source(source: Path, gate: Gate, parts: Sequence[tuple[str, str]] = ()) -> Checkpoint:
    """Open a checkpoint as :func:`verification.open_source` does, and note its files' states for :func:`run` to compare."""
    before = states_of(source)
    checkpoint = verification.open_source(source, gate, parts)
    for name in checkpoint.files:
        path = checkpoint.root / name
        if path.exists():  # another check reports missing files
            checkpoint.states[name] = before.get(path) or FileState.of(path.stat())
    return checkpoint


def _check_unchanged(checkpoint: Checkpoint) -> None:
    for name, state in checkpoint.states.items():
        path = checkpoint.root / name
        if not path.exists() or FileState.of(path.stat()) != state:
            raise changed(path)


def run(
    writer: Writer,
    checkpoint: Checkpoint,
    destination: Path,
    options: Mapping[str, Any],
    *,
    workers: int,
    progress: Progress,
    gate: Gate,
    notes: tuple[str, ...] = (),
) -> Result:
    """Check the source, write everything, verify it as :func:`labkit.checkpoint.verify` does, and publish the destination.

    Args:
        writer: Says which files to write, and writes them.
        checkpoint: The source, as :func:`open_source` returns it.
        destination: A path that must not exist.
        options: The user's options, for the manifest of a directory.
        workers: Files that are written at the same time.
        progress: Called with the number of bytes just written, from any thread.
        gate: The errors that the caller accepts.
        notes: Notes for the result, after those of the checkpoint.

    Raises:
        CheckpointExistsError: The destination exists, or something foreign is at ``destination.partial``.
        CheckpointWriteError: Another process is writing it, or the written data do not read back.
        VerificationError: The source or the result has errors that the gate does not accept.
        CheckpointError: The source cannot be read, or changed while it was read.

    Each error carries a note that says what is left on disk.

    Ranks: local. Tensor data take at most the largest piece plus 64 MiB of memory.
    """
    values = {value.key if value.entry is None else value.entry.key for file in writer.files for value in file.values}
    try:
        with Reader(checkpoint, checksums=not gate.allows("changed-content")) as reader:
            try:
                verification.check_source(checkpoint, gate, tensors=_sources(writer), values=values, reader=reader, workers=workers)
            except CheckpointError:
                _check_unchanged(checkpoint)  # a change of the source explains the error better
                raise
            left = _run(writer, reader, destination, options, workers, progress, gate)
    except CorruptCheckpointError as error:
        told = CorruptCheckpointError(error.path, f"{error.reason} {way_on(['changed-content'])}")
        told.__notes__ = getattr(error, "__notes__", [])
        raise told from None
    except OSError as error:
        said = " ".join(getattr(error, "__notes__", [f"{destination} was not made."]))
        raise CheckpointWriteError(error.filename or destination, f"{error.strerror or error}. {said}") from error
    pieces = [piece for file in writer.files for piece in file.pieces]
    num_tensors = len({piece.tensor.key for piece in pieces}) + len(writer.tied)
    size = sum(piece.size_bytes for piece in pieces)
    every = (*checkpoint.notes, *notes, *gate.notes(), *([left] if left else []))
    return Result(destination, size, num_tensors, len(writer.files), every, tuple(gate.accepted))


def _run(
    writer: Writer,
    source: Reader,
    destination: Path,
    options: Mapping[str, Any],
    workers: int,
    progress: Progress,
    gate: Gate,
) -> str:
    area = StagingArea(destination)
    try:
        try:
            done = _write_files(writer, source, area.data, workers, progress)
        except CheckpointError:
            _check_unchanged(source.checkpoint)  # a change of the source explains the error better
            raise
        _check_unchanged(source.checkpoint)
        extra = writer.finish(area.data, done)
        for name, total in extra.items():
            read_back(area.data, name, total)
        _check_result(writer, area, gate)
        if writer.single is None:
            files = {name: written.total for name, written in done.items()} | extra
            manifest.publish(area.data, Manifest(files, about={"source": str(source.checkpoint.path), **options}))
        return area.publish(writer.single)
    except BaseException as error:
        error.add_note(area.discard())
        raise


def read_back(folder: Path, name: str, total: FileSum) -> None:
    """Raise :class:`CheckpointWriteError` unless a file that was just written reads back correctly from the disk."""
    try:
        manifest.check_file(folder, name, total, from_disk=True)
    except CheckpointError as error:
        raise CheckpointWriteError(folder / name, f"what was just written does not read back ({error})") from None


def _sources(writer: Writer) -> set[str]:
    """Return the keys of the source's tensors to copy."""
    copied = [piece.tensor for file in writer.files for piece in file.pieces] + [tensor for tensor, _ in writer.tied.values()]
    return {origin(tensor.source) for tensor in copied}


class _StoppedError(Exception):
    """The run ended while a file was being written."""


def _advance(stop: threading.Event, progress: Progress, size: int) -> None:
    if stop.is_set():
        raise _StoppedError
    progress(size)


def _write_files(writer: Writer, source: Reader, folder: Path, workers: int, progress: Progress) -> dict[str, Written]:
    largest = max((piece.cost for file in writer.files for piece in file.pieces), default=0)
    budget = Budget(largest + _EXTRA_BYTES)
    todo = sorted(writer.files, key=lambda file: -file.size_bytes)
    stop = threading.Event()

    def work(file: OutFile) -> Written | None:
        if stop.is_set():
            return None
        with source.fork() as reader, suppress(_StoppedError):
            written = writer.write(file, folder / file.name, reader, budget.reserve, partial(_advance, stop, progress))
            read_back(folder, file.name, written.total)
            return written
        return None

    with ThreadPoolExecutor(max(1, min(workers, len(todo))), thread_name_prefix="labkit-migrate") as pool:
        futures: list[Future[Written | None]] = [pool.submit(work, file) for file in todo]
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
        for future in finished:
            future.result()
    return {file.name: written for file, future in zip(todo, futures, strict=True) if (written := future.result()) is not None}


def _check_result(writer: Writer, area: StagingArea, gate: Gate) -> None:
    """Open the result like any checkpoint: all shapes and dtypes must be as planned, and ``verify`` must find no error."""
    found = verification.check_written(area.data, writer.single, area.destination, gate)
    expected = {piece.tensor.key: piece.tensor.source for file in writer.files for piece in file.pieces}
    expected |= {key: tensor.source for key, (tensor, _) in writer.tied.items()}
    wrong = [key for key in expected if key not in found.tensors] + [key for key in found.tensors if key not in expected]
    for key, source in expected.items():
        entry = found.tensors.get(key)
        if entry is not None and (
            (entry.shape, entry.dtype) != (source.shape, source.dtype) or not coverage(entry.chunks, entry.shape).exact
        ):
            wrong.append(key)
    if wrong:
        raise CheckpointWriteError(area.data, f"what was written does not read back as planned: {', '.join(wrong[:8])}")
