"""Is a checkpoint complete, readable and what it should be?"""

from __future__ import annotations

from pathlib import Path

from labkit.checkpoint import verify_against, verify_data, verify_index, verify_steps
from labkit.checkpoint.catalog import open_checkpoint
from labkit.checkpoint.errors import CheckpointError, CheckpointNotFoundError, UnsafeCheckpointError
from labkit.checkpoint.findings import Report
from labkit.checkpoint.manifest import Manifest
from labkit.checkpoint.model import Checkpoint
from labkit.checkpoint.verify_against import ModelSource
from labkit.checkpoint.verify_data import Progress
from labkit.progress import task


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
        against: Another checkpoint, of any kind and sharding, that must hold the same bits under the same names.
        model: A model, or a function, ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION`` that builds one, whose names and shapes the
            checkpoint must have.
        data: Whether to read the data: hashes or checksums, declared dtypes, copies in other rank files, step counters.
        finite: Whether NaN and inf are errors.
        workers: Threads that read.

    Returns:
        What was looked at and what is wrong. A checkpoint that cannot even be opened gives one finding.

    Raises:
        CheckpointNotFoundError: There is nothing at one of the paths.
        CheckpointError: The model cannot be built.

    Ranks: local. Blocks for one read of the checkpoint, two with ``against`` or ``finite``.
    """
    report = Report(str(path))
    try:
        checkpoint = open_checkpoint(path, unknown="opaque")
    except CheckpointNotFoundError:
        raise
    except CheckpointError as error:
        code = "unsafe" if isinstance(error, UnsafeCheckpointError) else "unreadable"
        report.error(code, path, str(error).removeprefix(f"{path}: "), "a load fails, or is not safe")
        return report
    built = verify_against.build_model(model)
    flat = built is not None and verify_against.report_flat(checkpoint, report)
    broken = _check_index(checkpoint, report)
    found = verify_index.check_manifest(checkpoint, report)
    whole = not any(finding.code in ("missing-file", "short-file") for finding in report.findings)
    other = None if against is None else _open_other(against, report)
    if not whole and (data or other is not None):
        report.unchecked.append("the data, since files are missing or cut off")
    to_read = data * sum(checkpoint.files.values()) + (other is not None) * checkpoint.size_bytes
    with task("verify", to_read) as reading:
        if data and whole:
            broken = _check_data(checkpoint, found, report, finite, workers, reading.advance)
        trainable = None if built is None or flat else verify_against.trainable_names(built)
        verify_index.check_optimizer(checkpoint, report, trainable, broken)
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


def _check_index(checkpoint: Checkpoint, report: Report) -> set[str]:
    broken = verify_index.check_files(checkpoint, report)
    verify_index.check_coverage(checkpoint, report)
    verify_index.check_byte_ranges(checkpoint, report)
    verify_index.check_names(checkpoint, report)
    return broken


def _check_data(
    checkpoint: Checkpoint, found: Manifest | None, report: Report, finite: bool, workers: int, progress: Progress
) -> set[str]:
    """Read everything. Returns the files that are damaged."""
    if found is not None:
        damaged = verify_data.check_hashes(checkpoint, found, report, workers, progress)
    else:
        damaged = verify_data.check_archives(checkpoint, report, workers, progress)
    verify_data.check_values(checkpoint, report, workers, damaged)
    entries = list(checkpoint.tensors.values())
    verify_data.check_tensors(checkpoint, report, finite=finite, entries=entries, workers=workers, damaged=damaged)
    verify_data.check_moments(checkpoint, report, workers)
    verify_steps.check_steps(checkpoint, report, workers)
    return damaged


def _open_other(path: str | Path, report: Report) -> Checkpoint | None:
    """The checkpoint to compare with; None, and findings, when files of it are missing or cut off."""
    other = open_checkpoint(path, unknown="opaque")
    beside = Report(str(path))
    if not verify_index.check_files(other, beside):
        return other
    report.findings += [finding for finding in beside.findings if finding.severity == "error"]
    report.unchecked.append(f"equality with {path}, since files of it are missing or cut off")
    return None
