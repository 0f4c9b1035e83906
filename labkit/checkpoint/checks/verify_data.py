"""Checks that read the data: hashes and checksums, values, declared dtypes, NaN and inf, differing copies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from labkit.checkpoint.checks.findings import Report
from labkit.checkpoint.checks.verify_index import UNREAD
from labkit.checkpoint.data.read import Reader, same_bits
from labkit.checkpoint.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError, UnsupportedTensorError
from labkit.checkpoint.files.checksums import file_crc
from labkit.checkpoint.formats.archive import TorchArchive
from labkit.checkpoint.index import manifest
from labkit.checkpoint.index.held import Held
from labkit.checkpoint.index.manifest import Manifest
from labkit.checkpoint.index.model import Checkpoint, Chunk, ChunkTable, TensorEntry, ValueEntry
from labkit.checkpoint.index.sections import is_moment_piece
from labkit.checkpoint.pickles.pickle_records import UnsupportedTensor
from labkit.checkpoint.wording import counted

Progress = Callable[[int], None]
T = TypeVar("T")


def no_progress(_: int) -> None:
    """Ignore the number of bytes done."""


def each(jobs: Iterable[T], work: Callable[[T, Reader], None], source: Checkpoint | Reader, workers: int) -> None:
    """Run a function over jobs in threads; each thread has its own reader, forked from the given one.

    Raises:
        Exception: The first that the function raised. Jobs that have not begun by then are skipped.
    """
    base = source if isinstance(source, Reader) else Reader(source)
    # A future per job would cost more than checking a small tensor, so each thread takes jobs itself.
    waiting, taking, failed = iter(jobs), threading.Lock(), threading.Event()

    def run() -> None:
        with contextlib.closing(base.fork()) as reader:
            while not failed.is_set():
                with taking:
                    try:
                        job = next(waiting)
                    except StopIteration:
                        return
                try:
                    work(job, reader)
                except BaseException:
                    failed.set()
                    raise

    with ThreadPoolExecutor(workers, thread_name_prefix="labkit-verify") as pool:
        running = [pool.submit(run) for _ in range(workers)]
        try:
            for future in running:
                future.result()
        except BaseException:
            failed.set()  # also if the waiting thread is interrupted
            raise


def check_hashes(
    checkpoint: Checkpoint, found: Manifest, report: Report, workers: int, progress: Progress, names: Iterable[str]
) -> set[str]:
    """Compare files with the hashes in the manifest, and return the files that differ."""
    changed: set[str] = set()

    def check(name: str, _: Reader) -> None:
        try:
            manifest.check_file(checkpoint.path, name, found.files[name])
        except CheckpointError as error:
            changed.add(name)
            report.error("changed-content", checkpoint.path / name, str(error).split(": ", 1)[-1], "torch loads the changed values")
        report.count("hashed bytes", found.files[name].size)
        progress(found.files[name].size)

    each(names, check, checkpoint, workers)
    return changed


@dataclass(frozen=True, slots=True, eq=False)
class _Archive:
    """A torch.save archive to check: a whole file, or one entry of a DCP directory."""

    file: str
    start: int
    length: int
    entry: TensorEntry | ValueEntry | None = None
    size_bytes: int = 0

    @property
    def where(self) -> str:
        return self.file if self.entry is None else f"{self.entry.key} in {self.file}"


@dataclass(frozen=True, slots=True)
class _Fault:
    archive: _Archive
    code: str
    what: str
    consequence: str


def check_archives(checkpoint: Checkpoint, report: Report, workers: int, progress: Progress, *, storages: bool = True) -> set[str]:
    """Check every record of every torch.save archive against the CRC-32 that torch wrote (and never checks).

    Args:
        checkpoint: An opened checkpoint.
        report: Receives the findings.
        workers: Threads that read.
        progress: Called with the number of bytes just checked.
        storages: Whether to check tensors' storages too (nearly all of the bytes). Values in a DCP directory are always checked,
            including the tensors in them.

    Returns:
        The files with errors; all errors of one file are one finding.
    """
    if checkpoint.kind == "safetensors":
        report.unchecked.append("safetensors files have no checksums, and there is no manifest: changed bits cannot be detected")
        return set()
    faults: dict[str, list[_Fault]] = {}

    def check(archive: _Archive, reader: Reader) -> None:
        small_only = not storages and not isinstance(archive.entry, ValueEntry)
        for fault in _faults(archive, reader, report, small_only=small_only):
            faults.setdefault(archive.file, []).append(fault)
        progress(archive.length)

    each(_archives(checkpoint), check, checkpoint, workers)
    for file, found in faults.items():
        _report_faults(checkpoint.root / file, found, report)
    return set(faults)


def _archives(checkpoint: Checkpoint) -> Iterator[_Archive]:
    if checkpoint.kind != "dcp":
        yield from (_Archive(name, 0, size) for name, size in checkpoint.files.items() if not name.endswith(".json"))
        return
    for entry in checkpoint.tensors.values():
        for chunk in entry.chunks:
            yield _Archive(chunk.file, chunk.start, chunk.length, entry, chunk.numel * entry.dtype.itemsize)
    for value in checkpoint.values.values():
        yield _Archive(value.file, value.start, value.length, value)


def _faults(archive: _Archive, reader: Reader, report: Report, *, small_only: bool) -> Iterator[_Fault]:
    path = reader.checkpoint.root / archive.file
    try:
        opened = TorchArchive(reader.open(archive.file), path, archive.start, archive.length)
        records = opened.records()
    except CheckpointError as error:
        yield _Fault(archive, "unreadable", str(error).split(": ", 1)[-1], "a load fails")
        return
    for name, record in records.items():
        if small_only and name.startswith(f"{opened.prefix}/data/"):
            continue
        if record.crc != file_crc(reader.open(archive.file).fileno(), record.start, record.length):
            what = f"the record {name} does not match its checksum"
            yield _Fault(archive, "changed-content", what, "torch loads the changed values")
        report.count("checksummed bytes", record.length)


def _report_faults(path: Path, faults: Sequence[_Fault], report: Report) -> None:
    first = min(faults, key=lambda fault: (fault.code != "unreadable", fault.archive.start))
    if len(faults) == 1:
        report.error(first.code, first.archive.where, first.what, first.consequence)
        return
    what = f"{len(faults):,} of its records do not match their checksums"
    if first.archive.entry is not None:
        damaged: dict[str, tuple[TensorEntry | ValueEntry, int]] = {}
        for archive in sorted({fault.archive for fault in faults}, key=lambda archive: archive.start):
            assert archive.entry is not None
            entry, size = damaged.get(archive.entry.key, (archive.entry, 0))
            damaged[entry.key] = entry, size + archive.size_bytes
        held = Held()
        for entry, size in sorted(damaged.values(), key=lambda pair: isinstance(pair[0], ValueEntry)):
            held.add(entry, size)
        what = f"its data of {held.text} are damaged"
    report.error(first.code, path, f"{what}. The first: {first.what}", first.consequence)


def check_values(checkpoint: Checkpoint, report: Report, workers: int, damaged: Collection[str]) -> None:
    """Check that values' pickles in a DCP directory name nothing outside the allow-list; other formats have no such pickles.

    ``damaged`` are files that another finding already reports as unreadable.
    """

    def check(value: ValueEntry, reader: Reader) -> None:
        try:
            content, names = reader.stored(value)
        except CheckpointError as error:
            if value.file not in damaged:
                report.error(_code(error), value.key, error, "a load fails, or is not safe")
            return
        if isinstance(content, UnsupportedTensor):
            report.error("unsupported", value.key, f"not supported: {content.what}", UNREAD)
        if names:
            report.error("unsafe", value.key, f"its pickle asks for {', '.join(names)}", "DCP runs it")

    each([value for value in checkpoint.values.values() if value.length], check, checkpoint, workers)


def _code(error: CheckpointError) -> str:
    if isinstance(error, UnsafeCheckpointError):
        return "unsafe"
    return "unsupported" if isinstance(error, UnsupportedTensorError) else "unreadable"


def check_tensors(
    checkpoint: Checkpoint,
    report: Report,
    *,
    finite: bool,
    entries: Sequence[TensorEntry],
    workers: int,
    damaged: Collection[str] = (),
    copies: bool = False,
    progress: Progress = no_progress,
    reader: Reader | None = None,
) -> None:
    """Check the chunks' dtypes and shapes; with ``finite``, that there is no NaN or inf; with ``copies``, that copies are equal.

    ``damaged`` is as for :func:`check_values`. A ``reader`` that compares checksums also does so for the headers.
    """

    def check(job: tuple[TensorEntry, Chunk], reader: Reader) -> None:
        entry, chunk = job
        try:
            if finite and (entry.dtype.is_floating_point or entry.dtype.is_complex):
                _check_finite(entry, reader.chunk(entry, chunk), report)
            else:
                reader.data_start(entry, chunk)
        except CorruptCheckpointError as error:
            report.error("changed-content", f"{entry.key} in {chunk.file}", error.reason, "torch loads the changed values")
        except CheckpointError as error:
            if chunk.file not in damaged:
                report.error(_code(error), entry.key, error, "a load fails, or casts to the declared dtype")
        progress(chunk.length)

    each(((entry, chunk) for entry in entries for chunk in entry.chunks), check, reader or checkpoint, workers)
    each(
        [entry for entry in entries if copies and entry.replicas and not damaged],
        lambda entry, reader: _check_replicas(entry, reader, report),
        checkpoint,
        workers,
    )


def _check_finite(entry: TensorEntry, data: torch.Tensor, report: Report) -> None:
    values = data.float() if data.dtype.itemsize == 1 else data
    nans, infs = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    if nans or infs:
        report.error(
            "not-finite", entry.key, f"{nans} NaN and {infs} inf among {data.numel()} values", "training continues from them"
        )


def _check_replicas(entry: TensorEntry, reader: Reader, report: Report) -> None:
    if is_moment_piece(entry):
        text = "moments numbered by position may differ from file to file; migrate joins them with the help of the model"
        if text not in report.unchecked:
            report.unchecked.append(text)
        return
    differing = 0
    for table in entry.replicas:
        for chunk in table:
            try:
                expected = reader.box(entry, chunk.offsets, chunk.sizes)
                copy = reader.box(entry, chunk.offsets, chunk.sizes, table_of(chunk))
            except CheckpointError as error:
                report.error("unreadable", entry.key, error, "a load fails")
                return
            differing += not same_bits(expected, copy)
    if differing:
        report.warning(
            "copies-differ",
            entry.key,
            f"its values differ in {counted(differing, 'other rank file')}",
            "a load from one file gives every rank that rank's value",
        )


def table_of(chunk: Chunk) -> ChunkTable:
    """Return a table with a single chunk."""
    return ChunkTable.of([chunk], len(chunk.sizes))
