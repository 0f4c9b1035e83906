"""Run a writer: several files at once, within a memory budget, each read back before it counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from labkit.checkpoint.coverage import coverage
from labkit.checkpoint.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError, CorruptCheckpointError
from labkit.checkpoint.findings import Finding, Gate, way_on
from labkit.checkpoint.model import Checkpoint
from labkit.checkpoint.read import Reader
from labkit.checkpoint.sources import origin
from labkit.checkpoint.staging_area import StagingArea
from labkit.checkpoint.verification import check_source, check_written
from labkit.checkpoint.writers import OutFile, Writer

_EXTRA_BYTES = 1 << 26
Progress = Callable[[int], None]


class Budget:
    """How much tensor data may be in memory at once, over all threads.

    A request larger than the whole budget is granted when nothing else is held.
    """

    def __init__(self, total: int) -> None:
        self._total, self._held = total, 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Hold ``size`` bytes; waits until others have given back enough."""
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
    """What a migration or reshard wrote.

    Attributes:
        path: The destination.
        size_bytes: Tensor bytes in it.
        num_tensors, num_files: Counts.
        resumed: Files taken over from an earlier run that was killed.
        notes: Sentences about what was decided on the way.
        accepted: Errors of the source or the destination that the caller accepted with ``despite``.
    """

    path: Path
    size_bytes: int
    num_tensors: int
    num_files: int
    resumed: int = 0
    notes: tuple[str, ...] = ()
    accepted: tuple[Finding, ...] = ()


def check_destination(source: Path, destination: Path) -> None:
    """Raise :class:`CheckpointExistsError` when the destination exists, :class:`CheckpointError` when it lies in the source."""
    if destination.exists():
        raise CheckpointExistsError(destination, "the destination exists. Choose another one, or remove it.")
    if source.is_dir() and destination.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(
            f"{destination} lies in {source}, and a source is only read. Choose a destination beside it or elsewhere."
        )


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
    """Check the source, write everything, verify it as :func:`labkit.checkpoint.verify` does, and let the destination appear.

    Raises:
        CheckpointExistsError: The destination exists.
        CheckpointWriteError: Another process writes it, or what was written does not read back.
        VerificationError: The source or what would come out has errors that the gate does not let pass.
        CheckpointError: The source cannot be read.

    An error has a note that says what is left: finished files where the same run may go on with them, else nothing.

    Ranks: local. Memory for tensor data stays below the largest piece and 64 MiB.
    """
    values = {value.key if value.entry is None else value.entry.key for file in writer.files for value in file.values}
    reader = Reader(checkpoint, checksums=not gate.allows("changed-content"))
    check_source(checkpoint, gate, tensors=_sources(writer), values=values, reader=reader, workers=workers)
    tied = {key: owner for key, (_, owner) in writer.tied.items()}
    plan = {"source": _identity(checkpoint), "options": dict(options), "files": _layout(writer), "tied": tied}
    try:
        resumed = _run(writer, reader, destination, plan, workers, progress, gate)
    except CorruptCheckpointError as error:
        told = CorruptCheckpointError(error.path, f"{error.reason} {way_on(['changed-content'])}")
        told.__notes__ = getattr(error, "__notes__", [])
        raise told from None
    except OSError as error:
        left = " ".join(getattr(error, "__notes__", [f"{destination} was not made."]))
        raise CheckpointWriteError(error.filename or destination, f"{error.strerror or error}. {left}") from error
    pieces = [piece for file in writer.files for piece in file.pieces]
    num_tensors = len({piece.tensor.key for piece in pieces}) + len(writer.tied)
    size = sum(piece.size_bytes for piece in pieces)
    every = (*notes, *gate.notes())
    return Result(destination, size, num_tensors, len(writer.files), resumed, every, tuple(gate.accepted))


def _run(
    writer: Writer,
    source: Reader,
    destination: Path,
    plan: Mapping[str, Any],
    workers: int,
    progress: Progress,
    gate: Gate,
) -> int:
    area = StagingArea(destination, plan)
    try:
        resumed = area.resumed
        _write_files(writer, source, area, workers, progress)
        extra = writer.finish(area.folder, area.done)
        _check_result(writer, area, gate)
        area.publish(extra, {"source": str(source.checkpoint.path), **plan["options"]}, as_file=writer.single)
    except BaseException as error:
        # What was refused is refused again, with whatever files; a full disk or an interrupt may be over.
        error.add_note(area.stop(resumable=isinstance(error, CheckpointWriteError) or not isinstance(error, CheckpointError)))
        raise
    return resumed


def _sources(writer: Writer) -> set[str]:
    """Return the keys of the source's tensors that are copied."""
    copied = [piece.tensor for file in writer.files for piece in file.pieces] + [tensor for tensor, _ in writer.tied.values()]
    return {origin(tensor.source) for tensor in copied}


class _StoppedError(Exception):
    """The run has ended meanwhile."""


def _advance(stop: threading.Event, progress: Progress, size: int) -> None:
    if stop.is_set():
        raise _StoppedError
    progress(size)


def _write_files(writer: Writer, source: Reader, area: StagingArea, workers: int, progress: Progress) -> None:
    largest = max((piece.cost for file in writer.files for piece in file.pieces), default=0)
    budget = Budget(largest + _EXTRA_BYTES)
    for file in writer.files:
        if file.name in area.done:
            progress(file.size_bytes)
    todo = sorted((file for file in writer.files if file.name not in area.done), key=lambda file: -file.size_bytes)
    stop = threading.Event()

    def work(file: OutFile) -> None:
        if stop.is_set():
            return
        temporary = area.temporary(file.name)
        temporary.unlink(missing_ok=True)
        with source.fork() as reader, suppress(_StoppedError):
            advance = partial(_advance, stop, progress)
            area.finish_file(file.name, writer.write(file, temporary, reader, budget.reserve, advance))

    with ThreadPoolExecutor(max(1, min(workers, len(todo))), thread_name_prefix="labkit-migrate") as pool:
        futures: list[Future[None]] = [pool.submit(work, file) for file in todo]
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
        for future in finished:
            future.result()


def _identity(checkpoint: Checkpoint) -> list[Any]:
    files = []
    for name in sorted(checkpoint.files):
        status = (checkpoint.root / name).stat()
        files.append([name, status.st_size, status.st_mtime_ns])
    return [str(checkpoint.root.resolve()), files]


def _layout(writer: Writer) -> list[Any]:
    return [
        [
            file.name,
            [[piece.tensor.key, piece.tensor.source.label, str(piece.tensor.source.dtype), piece.box] for piece in file.pieces],
            [value.key for value in file.values],
        ]
        for file in writer.files
    ]


def _check_result(writer: Writer, area: StagingArea, gate: Gate) -> None:
    """Open what was written like any checkpoint: each name is there with its shape and dtype, and ``verify`` finds no error."""
    found = check_written(area.folder, writer.single, area.destination, gate)
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
        raise CheckpointWriteError(area.folder, f"what was written does not read back as planned: {', '.join(wrong[:8])}")
