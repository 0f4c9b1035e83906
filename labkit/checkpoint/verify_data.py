"""What only reading the data tells: checksums, declared dtypes, NaN and inf, copies that differ, shared moments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from labkit.checkpoint import manifest
from labkit.checkpoint.archive import TorchArchive
from labkit.checkpoint.checksums import file_crc
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.findings import Report
from labkit.checkpoint.manifest import Manifest
from labkit.checkpoint.model import Checkpoint, Chunk, ChunkTable, TensorEntry, ValueEntry
from labkit.checkpoint.names import counted
from labkit.checkpoint.read import Reader, same_bits
from labkit.checkpoint.sections import is_moment_piece

Progress = Callable[[int], None]
T = TypeVar("T")
_MOMENTS = (("exp_avg", "exp_avg_sq"), ("exp_avg_sq", "max_exp_avg_sq"))


def no_progress(_: int) -> None:
    """Takes the number of bytes done, and does nothing with it."""


def each(jobs: Iterable[T], work: Callable[[T, Reader], None], checkpoint: Checkpoint, workers: int) -> None:
    """Run a function over jobs in threads; each thread has a reader of its own."""
    local = threading.local()
    readers: list[Reader] = []

    def run(job: T) -> None:
        if not hasattr(local, "reader"):
            local.reader = Reader(checkpoint)
            readers.append(local.reader)
        work(job, local.reader)

    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="labkit-verify") as pool:
            for _ in pool.map(run, jobs):
                pass
    finally:
        for reader in readers:
            reader.close()


def check_hashes(checkpoint: Checkpoint, found: Manifest, report: Report, workers: int, progress: Progress) -> None:
    """Every file has the hash that the manifest gives."""

    def check(name: str, _: Reader) -> None:
        try:
            manifest.check_file(checkpoint.path, name, found.files[name])
        except CheckpointError as error:
            report.error("changed-content", checkpoint.path / name, str(error).split(": ", 1)[-1], "torch loads the changed values")
        report.count("hashed bytes", found.files[name].size)
        progress(found.files[name].size)

    each(sorted(found.files), check, checkpoint, workers)


def check_archives(checkpoint: Checkpoint, report: Report, workers: int, progress: Progress) -> None:
    """Every record of every torch.save archive has the CRC-32 that torch noted when it wrote it (and never looks at again)."""
    if checkpoint.kind == "safetensors":
        report.unchecked.append("safetensors files carry no checksum, and there is no manifest: changed bits cannot be told")
        return
    each(list(_archives(checkpoint)), lambda job, reader: _check_archive(job, reader, report, progress), checkpoint, workers)


def _archives(checkpoint: Checkpoint) -> Iterator[tuple[str, int, int, str]]:
    if checkpoint.kind != "dcp":
        yield from ((name, 0, size, name) for name, size in checkpoint.files.items() if not name.endswith(".json"))
        return
    for entry in checkpoint.tensors.values():
        yield from ((chunk.file, chunk.start, chunk.length, f"{entry.key} in {chunk.file}") for chunk in entry.chunks)
    yield from ((value.file, value.start, value.length, f"{value.key} in {value.file}") for value in checkpoint.values.values())


def _check_archive(job: tuple[str, int, int, str], reader: Reader, report: Report, progress: Progress) -> None:
    file, start, length, where = job
    path = reader.checkpoint.root / file
    try:
        archive = TorchArchive(reader.open(file), path, start, length)
        records = archive.records()
    except CheckpointError as error:
        report.error("unreadable", where, str(error).split(": ", 1)[-1], "a load fails on the reading rank only")
        return
    for name, record in records.items():
        if record.crc != file_crc(reader.open(file).fileno(), record.start, record.length):
            report.error(
                "changed-content", where, f"the record {name} does not match its checksum", "torch loads the changed values"
            )
        report.count("checksummed bytes", record.length)
    progress(length)


def check_values(checkpoint: Checkpoint, report: Report, workers: int) -> None:
    """No value's pickle in a DCP directory asks for anything outside the allow-list; elsewhere the index told already."""

    def check(value: ValueEntry, reader: Reader) -> None:
        try:
            _, names = reader.stored(value)
        except CheckpointError as error:
            # What is cut off or changed is a finding already.
            if not any(value.file in finding.where for finding in report.findings):
                report.error("unreadable", value.key, str(error), "a load fails on the reading rank only")
            return
        if names:
            report.error("unsafe", value.key, f"its pickle asks for {', '.join(names)}", "DCP runs it")

    each([value for value in checkpoint.values.values() if value.length], check, checkpoint, workers)


def check_tensors(
    checkpoint: Checkpoint,
    report: Report,
    *,
    finite: bool,
    entries: Sequence[TensorEntry],
    workers: int,
    progress: Progress = no_progress,
) -> None:
    """Each chunk holds the declared dtype and shape; with ``finite``, no NaN and no inf; copies equal each other."""

    def check(job: tuple[TensorEntry, Chunk], reader: Reader) -> None:
        entry, chunk = job
        try:
            if finite and (entry.dtype.is_floating_point or entry.dtype.is_complex):
                _check_finite(entry, reader.chunk(entry, chunk), report)
            else:
                reader.data_start(entry, chunk)
        except CheckpointError as error:
            report.error("unreadable", entry.key, str(error), "a load fails, or casts to the declared dtype")
        progress(chunk.length)

    each(((entry, chunk) for entry in entries for chunk in entry.chunks), check, checkpoint, workers)
    each(
        [entry for entry in entries if entry.replicas],
        lambda entry, reader: _check_replicas(entry, reader, report),
        checkpoint,
        workers,
    )


def _check_finite(entry: TensorEntry, data: torch.Tensor, report: Report) -> None:
    values = data.float() if data.dtype.itemsize == 1 else data
    nans, infs = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    if nans or infs:
        report.error(
            "not-finite", entry.key, f"{nans} NaN and {infs} inf among {data.numel()} values", "training goes on from them"
        )


def _check_replicas(entry: TensorEntry, reader: Reader, report: Report) -> None:
    if is_moment_piece(entry):
        text = "moments numbered by position may differ from file to file; migrate with the model puts them together"
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
                report.error("unreadable", entry.key, str(error), "a load fails")
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
    """A table with one chunk in it."""
    return ChunkTable.of([chunk], len(chunk.sizes))


def check_moments(checkpoint: Checkpoint, report: Report, workers: int) -> None:
    """First and second moments are not the same bits: FSDP1's full optimizer state on the CPU shares one buffer for both."""
    pairs = []
    for key, entry in checkpoint.tensors.items():
        for first, second in _MOMENTS[:1]:
            other = checkpoint.tensors.get(key.removesuffix(first) + second) if key.endswith("." + first) else None
            if entry.section == "optimizer" and other is not None and other.numel and other.shape == entry.shape:
                pairs.append((entry, other))

    def check(pair: tuple[TensorEntry, TensorEntry], reader: Reader) -> None:
        left, right = pair
        report.count("pairs of moments")
        try:
            if left.tied_to is None and right.tied_to is None and not _first_rows_equal(reader, left, right):
                return
            mean, square = reader.tensor(left.key), reader.tensor(right.key)
        except CheckpointError:
            return  # what cannot be read is another check's finding
        if same_bits(mean, square) and bool(mean.any()):
            report.error(
                "shared-moments",
                left.key,
                f"it has the same bits as {right.key.rsplit('.', 1)[-1]}",
                "Adam goes on with a wrong first moment (FSDP1's full optimizer state on the CPU does this)",
            )

    each(pairs, check, checkpoint, workers)


def _first_rows_equal(reader: Reader, left: TensorEntry, right: TensorEntry) -> bool:
    sizes = (min(left.shape[0], 1), *left.shape[1:]) if left.shape else ()
    zeros = (0,) * len(left.shape)
    return same_bits(reader.box(left, zeros, sizes), reader.box(right, zeros, sizes))
