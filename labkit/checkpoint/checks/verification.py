"""Verification that a checkpoint is complete, readable and unchanged.

:func:`verify` reads every byte and reports. :func:`check_small` makes the same checks but skips hashes and checksums of tensor
data. Migrating, resharding and loading start with it, and stop if it finds errors (:class:`findings.Gate`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from labkit.base.progress import task
from labkit.checkpoint.checks import verify_against, verify_data, verify_index, verify_optimizer
from labkit.checkpoint.checks.findings import Gate, Report
from labkit.checkpoint.checks.unsafe_entries import way_without
from labkit.checkpoint.checks.verify_against import ModelSource
from labkit.checkpoint.checks.verify_data import Progress
from labkit.checkpoint.contents.trainer_shards import shards_of_trainers
from labkit.checkpoint.data.read import Reader
from labkit.checkpoint.errors import CheckpointError, CheckpointNotFoundError, UnsafeCheckpointError
from labkit.checkpoint.formats.catalog import open_checkpoint, open_parts, read_checkpoint
from labkit.checkpoint.index.manifest import Manifest
from labkit.checkpoint.index.model import Checkpoint
from labkit.checkpoint.pickles.safe_pickle import Unknown


def verify(
    path: str | Path,
    *,
    against: str | Path | None = None,
    model: ModelSource | None = None,
    data: bool = True,
    finite: bool = False,
    workers: int = 2,
) -> Report:
    """Verify a checkpoint of any kind.

    Args:
        path: As for :func:`open_checkpoint`.
        against: Another checkpoint, of any kind and sharding, that must have the same names and be bit-identical.
        model: A model, or what builds one: a function, ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``. The checkpoint must have its
            names and shapes.
        data: Whether to read the data: hashes or checksums, declared dtypes, copies in other rank files, step counters.
        finite: Whether NaN and inf are errors.
        workers: Threads that read.

    Returns:
        The findings, and what was checked. If the checkpoint cannot be opened at all, that is the one finding.

    Raises:
        CheckpointNotFoundError: There is nothing at one of the paths.
        CheckpointError: The model cannot be built, or ``against`` cannot be opened.

    Ranks: local. Blocks for one read of the checkpoint, two with ``against`` or ``finite``.
    """
    report = Report(str(path))
    try:
        checkpoint = open_checkpoint(path, unknown="opaque")
    except CheckpointNotFoundError:
        raise
    except CheckpointError as error:
        code = "unsafe" if isinstance(error, UnsafeCheckpointError) else "unreadable"
        report.error(code, path, error, "a load fails, or is not safe")
        return report
    built = verify_against.build_model(model)
    flat = built is not None and verify_against.report_flat(checkpoint, report)
    broken = _check_index(checkpoint, checkpoint, report)
    _check_shards(checkpoint, checkpoint, report)
    found = verify_index.check_manifest(checkpoint, report)
    whole = _is_whole(report)
    other = None if against is None else _open_other(against, report)
    if not whole and (data or other is not None):
        report.unchecked.append("the data, since files are missing or cut off")
    to_read = data * sum(checkpoint.files.values()) + (other is not None) * checkpoint.size_bytes
    with task("verify", to_read) as reading:
        if data and whole:
            broken = _check_data(checkpoint, found, report, finite, workers, reading.advance)
        trainable = None if built is None or flat else verify_against.trainable_names(built)
        verify_optimizer.check_optimizer(checkpoint, report, trainable, broken)
        if built is not None and not flat:
            verify_against.check_model(checkpoint, built, report)
            if data and whole:
                verify_against.check_ties(checkpoint, built, report)
        if other is not None and whole:
            either = [verify_against.report_flat(side, report) for side in (checkpoint, other)]
            if not any(either):
                verify_against.check_against(checkpoint, other, report, workers, reading.advance)
    report.findings.sort(key=lambda finding: (finding.severity != "error", finding.code, finding.where))
    return report


def open_source(path: Path, gate: Gate, parts: Sequence[tuple[str, str]] = ()) -> Checkpoint:
    """Open a source checkpoint within what the gate allows; assemble it from ``parts`` if given.

    Raises:
        UnsafeCheckpointError: Its pickle names something outside the allow-list that the caller does not accept.
        CheckpointError: As :func:`open_checkpoint`.
    """

    def opened(unknown: Unknown) -> Checkpoint:
        return open_parts(path, parts, unknown=unknown) if parts else open_checkpoint(path, unknown=unknown)

    try:
        return opened("opaque" if gate.allows("unsafe") else "refuse")
    except UnsafeCheckpointError as error:
        try:
            advice = way_without(opened("opaque"))
        except CheckpointError:
            advice = way_without(None)
        raise UnsafeCheckpointError(error.path, error.names, advice=advice) from None


def check_source(
    checkpoint: Checkpoint,
    gate: Gate,
    *,
    tensors: Collection[str],
    values: Collection[str],
    reader: Reader | None = None,
    workers: int = 2,
) -> None:
    """Check a checkpoint that is to be copied, before anything is written.

    Files and the index are checked as a whole. Only entries that are copied are checked, so that an error in something left out
    does not stop the rest. Checksums of tensor data are usually compared during the copy, so here only safetensors, which have
    none, are hashed, provided there is a manifest. But if the caller accepts changed data, all checksums are compared here, so that
    the accepted errors can be listed.

    Args:
        checkpoint: The opened source.
        gate: The errors that the caller accepts.
        tensors: The keys of the tensors to copy.
        values: The keys of the values to copy.
        reader: A reader of the source; it keeps the tensors' headers that it reads here.
        workers: Threads that read.

    Raises:
        VerificationError: It has errors that the caller does not accept.
    """
    report = Report(str(checkpoint.path))
    storages = gate.allows("changed-content")
    if checkpoint.parts:
        for one in checkpoint.parts:
            check_small(one, report, storages=storages, workers=workers)
        gate.check(report, "Nothing was written.")
        return
    part = _part(checkpoint, tensors, values)
    check_small(part, report, whole=checkpoint, storages=storages, reader=reader, workers=workers)
    gate.check(report, "Nothing was written.")


def check_ranks(checkpoint: Checkpoint, gate: Gate) -> None:
    """Check that no rank's file is missing, since that may be what caused another error.

    Raises:
        VerificationError: A file is missing, and the caller does not accept that.
    """
    report = Report(str(checkpoint.path))
    for one in checkpoint.parts or [checkpoint]:
        verify_index.check_ranks(one, report)
    gate.check(report, "Nothing was written.")


def check_written(folder: Path, single: str | None, destination: Path, gate: Gate) -> Checkpoint:
    """Open a checkpoint that was just written, and check it like any other.

    The hashes of its files, which include the headers of its tensors, have already been compared.

    Raises:
        VerificationError: It has errors that the caller does not accept.
    """
    unknown = "opaque" if gate.allows("unsafe") else "refuse"
    found = read_checkpoint(folder if single is None else folder / single, unknown=unknown)  # type: ignore[arg-type]
    report = Report(str(destination))
    check_small(found, report, headers=False)
    here, there = str(folder if single is None else folder / single), str(destination)
    report.findings = [replace(finding, where=finding.where.replace(here, there)) for finding in report.findings]
    gate.check(report, f"{destination} was not made, since it would have these errors.")
    return found


def check_loaded(reader: Reader, gate: Gate, *, without: Collection[str]) -> list[str]:
    """Check the part that is to be loaded: the index, the moments, and whether the optimizer state is complete.

    Args:
        reader: A reader of the opened checkpoint; it keeps the tensors' headers that it reads here.
        gate: The errors that the caller accepts.
        without: The keys that are not loaded; errors in them are ignored.

    Returns:
        The findings that the caller accepted, one sentence each.

    Raises:
        VerificationError: It has errors that the caller does not accept.

    Ranks: local.
    """
    checkpoint = reader.checkpoint
    part = _part(checkpoint, checkpoint.tensors.keys() - without, checkpoint.values.keys() - without)
    report = Report(str(checkpoint.path))
    check_small(part, report, whole=checkpoint, headers=False, values=False, reader=reader)
    _check_shards(checkpoint, part, report)
    gate.check(report, "Nothing was loaded.")
    return gate.notes()


def _part(checkpoint: Checkpoint, tensors: Collection[str], values: Collection[str]) -> Checkpoint:
    return replace(
        checkpoint,
        tensors={key: entry for key, entry in checkpoint.tensors.items() if key in tensors},
        values={key: entry for key, entry in checkpoint.values.items() if key in values},
    )


def check_small(
    part: Checkpoint,
    report: Report,
    *,
    whole: Checkpoint | None = None,
    headers: bool = True,
    values: bool = True,
    storages: bool = False,
    reader: Reader | None = None,
    workers: int = 2,
) -> None:
    """Make every check of :func:`verify` that does not need to read all bytes.

    Args:
        part: An opened checkpoint, or a copy of it with only the entries to check.
        report: Receives the findings.
        whole: The checkpoint that ``part`` belongs to; by default ``part`` itself.
        headers: Whether to check each tensor's header in its file.
        values: Whether to check each value.
        storages: Whether to compare the checksums of tensor data as well.
        reader: A reader of the same checkpoint, if there is one.
        workers: Threads that read.
    """
    whole = part if whole is None else whole
    reader = reader or Reader(whole)
    damaged = _check_index(whole, part, report)
    found = verify_index.check_manifest(whole, report)
    if _is_whole(report):
        if headers and found is not None:
            unsummed = [name for name in found.files if whole.kind == "safetensors" or not verify_index.holds_data(name)]
            damaged |= verify_data.check_hashes(whole, found, report, workers, verify_data.no_progress, sorted(unsummed))
        if values:
            # For a DCP directory's tensors, the reader itself checks the headers' checksums.
            summed = part if storages or part.kind != "dcp" else replace(part, tensors={})
            damaged |= verify_data.check_archives(summed, report, workers, verify_data.no_progress, storages=storages)
            verify_data.check_values(part, report, workers, damaged)
        if headers:
            entries, looking = list(part.tensors.values()), reader.fork(checksums=not storages)
            verify_data.check_tensors(part, report, finite=False, entries=entries, workers=workers, damaged=damaged, reader=looking)
        verify_optimizer.check_moments(part, report, workers, reader.fork(checksums=False))
    # Completeness can be judged only on the whole optimizer state; findings on entries that are left out are dropped.
    optimizer = Report(report.path)
    verify_optimizer.check_optimizer(whole, optimizer, None, damaged)
    keys = [*part.tensors, *part.values]
    report.findings += [
        finding for finding in optimizer.findings if part is whole or any(f"{key}.".startswith(f"{finding.where}.") for key in keys)
    ]


def _is_whole(report: Report) -> bool:
    return not any(finding.code in ("missing-file", "short-file") for finding in report.findings)


def _check_index(whole: Checkpoint, part: Checkpoint, report: Report) -> set[str]:
    broken = verify_index.check_files(whole, report)
    verify_index.check_form(whole, report)
    verify_index.check_coverage(part, report)
    verify_index.check_byte_ranges(part, report)
    verify_index.check_forms(part, report)
    verify_index.check_names(whole, report)
    return broken


def _check_shards(whole: Checkpoint, part: Checkpoint, report: Report) -> None:
    """Check that what is to be loaded was not split by a trainer. A migration does this itself, once it knows what is left out."""
    if (shards := shards_of_trainers(whole, part)) is not None:
        report.error("trainer-shards", whole.path, shards, "a load gets a part of the model or of its state")


def _check_data(
    checkpoint: Checkpoint, found: Manifest | None, report: Report, finite: bool, workers: int, progress: Progress
) -> set[str]:
    """Read everything, and return the files that are damaged."""
    if found is not None:
        damaged = verify_data.check_hashes(checkpoint, found, report, workers, progress, sorted(found.files))
    else:
        damaged = verify_data.check_archives(checkpoint, report, workers, progress)
    verify_data.check_values(checkpoint, report, workers, damaged)
    entries = list(checkpoint.tensors.values())
    verify_data.check_tensors(checkpoint, report, finite=finite, entries=entries, workers=workers, damaged=damaged, copies=True)
    verify_optimizer.check_moments(checkpoint, report, workers)
    verify_optimizer.check_steps(checkpoint, report, workers)
    return damaged


def _open_other(path: str | Path, report: Report) -> Checkpoint | None:
    """Open the checkpoint to compare with; if files of it are missing or cut off, report that and return None."""
    other = open_checkpoint(path, unknown="opaque")
    beside = Report(str(path))
    if not verify_index.check_files(other, beside):
        return other
    report.findings += [finding for finding in beside.findings if finding.severity == "error"]
    report.unchecked.append(f"equality with {path}, since files of it are missing or cut off")
    return None
