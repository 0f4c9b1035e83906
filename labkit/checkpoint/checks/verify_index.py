"""Checks that need only the index and the manifest: files, versions, coverage, byte ranges and names."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path, PurePosixPath

from labkit.base.plain_text import format_ranks, name_ranks
from labkit.checkpoint.checks.findings import Report
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.formats.dcp_format import METADATA_FILE
from labkit.checkpoint.formats.dcp_versions import refusals
from labkit.checkpoint.index import manifest
from labkit.checkpoint.index.coverage import Coverage, coverage
from labkit.checkpoint.index.held import also_in, held_in_files
from labkit.checkpoint.index.manifest import Manifest
from labkit.checkpoint.index.model import Checkpoint, TensorEntry, unsupported
from labkit.checkpoint.index.names import twins
from labkit.checkpoint.index.sections import Nest, name_in, nest_of, wrappers_of
from labkit.checkpoint.wording import bytes_text, counted, listed

_LATE_S = 2.0
UNREAD = "labkit migrates and loads the rest without it"


def check_files(checkpoint: Checkpoint, report: Report) -> set[str]:
    """Check that every file named by the index exists and is long enough, and that there are no other data files.

    Returns:
        The files that are missing or too short.
    """
    broken: set[str] = set()
    needed = held_in_files(checkpoint)
    for name, held in sorted(needed.items()):
        size = checkpoint.files.get(name, -1)
        report.count("files")
        if size >= held.end:
            continue
        broken.add(name)
        path = checkpoint.root / name
        if size < 0:
            what = f"the index names this file, which is missing. It held {held.text}"
            what += f". {there}" if (there := also_in(checkpoint.root, name)) else ""
            report.error("missing-file", path, what, "a load fails")
        else:
            what = f"it has {size} bytes and the index needs {held.end}. It holds {held.text}"
            report.error("short-file", path, what, "a load of the data at its end fails")
    check_ranks(checkpoint, report)
    if checkpoint.kind == "dcp":
        _check_strays(checkpoint, set(needed), report)
    return broken


def check_ranks(checkpoint: Checkpoint, report: Report) -> None:
    """Check that no rank's file and no numbered file is missing."""
    if checkpoint.missing_ranks:
        ranks = sorted(checkpoint.ranks.values())
        from_one = ranks == list(range(1, len(ranks) + 1))
        hint = "; if the names count from 1, write {rank+1} in place of the number" if from_one else ""
        report.error(
            "missing-rank",
            checkpoint.path,
            f"there are files of {name_ranks(ranks)}, but none of "
            f"{name_ranks(checkpoint.missing_ranks)}. Copy them from where those ranks saved{hint}",
            "what those ranks saved is lost",
        )
    for gap in checkpoint.gaps:
        report_gap = report.error if gap.severity == "error" else report.warning
        report_gap("missing-rank", checkpoint.path, gap.what, "the data in the other files are not loaded")


def _check_strays(checkpoint: Checkpoint, named: set[str], report: Report) -> None:
    here = {PurePosixPath(name).as_posix() for name in named}  # an index may say ./__0_0.distcp
    for path in sorted(checkpoint.root.glob("*.distcp")):
        if path.name not in here:
            report.warning("stray-file", path, "the index does not name it", "it is left over from another save and takes space")
    written = (checkpoint.root / METADATA_FILE).stat().st_mtime
    late = [
        name for name in named if (checkpoint.root / name).exists() and (checkpoint.root / name).stat().st_mtime > written + _LATE_S
    ]
    if late and manifest_of(checkpoint) is None:
        report.warning(
            "late-file",
            checkpoint.root / late[0],
            f".metadata, which a save writes last, is older than {counted(len(late), 'file')}, such as this one",
            "an overwrite that stopped half way loads as a mixture of two steps",
        )


def holds_data(name: str) -> bool:
    """Return whether a file holds tensor data rather than an index."""
    return Path(name).suffix in (".distcp", ".safetensors")


def manifest_of(checkpoint: Checkpoint) -> Manifest | None:
    """Return the checkpoint's manifest if it is a directory with a readable manifest; else None."""
    if not checkpoint.path.is_dir():
        return None
    try:
        return manifest.read(checkpoint.path)
    except CheckpointError:
        return None


def check_form(checkpoint: Checkpoint, report: Report) -> None:
    """Check that the installed torch and Python can read a DCP index."""
    for code, what in refusals(checkpoint):
        report.error(code, checkpoint.root / METADATA_FILE, what, "every load with DCP fails here; labkit reads it")


def check_coverage(checkpoint: Checkpoint, report: Report) -> None:
    """Check that every element of a tensor is in exactly one chunk, and that every tensor is of a kind that labkit reads."""
    gaps: list[tuple[TensorEntry, Coverage]] = []
    for entry in checkpoint.tensors.values():
        report.count("tensors")
        report.count("chunks", len(entry.chunks))
        found = coverage(entry.chunks, entry.shape)
        if found.missing:
            gaps.append((entry, found))
        if found.doubled:
            which = "" if found.overlap is None else f" (chunks {found.overlap[0]} and {found.overlap[1]})"
            report.error(
                "overlapping",
                entry.key,
                f"{found.doubled} elements are in several chunks{which}",
                "which value wins depends on the order of reading",
            )
        if found.outside:
            report.error(
                "outside",
                entry.key,
                f"{counted(len(found.outside), 'chunk')} outside the shape {entry.shape}",
                "the index is damaged",
            )
    _report_gaps(checkpoint, gaps, report)
    for value in checkpoint.values.values():
        what = unsupported(value)
        if what is not None:
            report.error("unsupported", value.key, f"not supported: {what}", UNREAD)


def _report_gaps(checkpoint: Checkpoint, gaps: list[tuple[TensorEntry, Coverage]], report: Report) -> None:
    silently = "they keep whatever was in memory"
    if checkpoint.kind != "dcp" and len(gaps) > 1:
        # No index lists these files, so the gaps are the only sign of a missing file.
        size = sum(found.missing * entry.dtype.itemsize for entry, found in gaps)
        ranks = sorted({rank for name in checkpoint.files for rank in [checkpoint.writer(name)] if rank is not None})
        there = f" There are files of {'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}." if ranks else ""
        report.error(
            "uncovered",
            checkpoint.path,
            f"{len(gaps):,} of {counted(len(checkpoint.tensors), 'tensor')} lack elements, {bytes_text(size)} in all "
            f"({listed([entry.key for entry, _ in gaps])}): the file of a rank is missing.{there}",
            silently,
        )
        return
    for entry, found in gaps:
        where = "" if found.gap is None else f", for example {_box_text(*found.gap)}"
        what = f"{found.missing} of {entry.numel} elements are in no chunk{where}"
        report.error("uncovered", entry.key, what, silently)


def _box_text(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offsets, sizes, strict=True)) + "]"


def check_forms(checkpoint: Checkpoint, report: Report) -> None:
    """Check that each tensor has the same form in the files of all ranks."""
    found = [f"{key} is {forms}" for key, forms in checkpoint.conflicts.items() if key in checkpoint.tensors]
    if found:
        report.error(
            "unreadable",
            checkpoint.path,
            f"{counted(len(found), 'tensor')} with other forms in other ranks' files: {listed(found, most=3)}",
            "nothing says which form is meant",
        )


def check_byte_ranges(checkpoint: Checkpoint, report: Report) -> None:
    """Check that only different names of the same tensor share bytes."""
    ranges: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for entry in checkpoint.tensors.values():
        if entry.tied_to is not None:
            report.count("tied tensors")
            continue
        if checkpoint.kind in ("torch", "torch_ranks"):
            continue  # views of one storage are normal in a torch.save file
        table = entry.chunks
        for file_id, start, length in zip(table.file_ids.tolist(), table.starts.tolist(), table.lengths.tolist(), strict=True):
            if length:
                ranges[table.files[file_id]].append((start, start + length, entry.key))
    for value in checkpoint.values.values():
        if value.length:
            ranges[value.file].append((value.start, value.start + value.length, value.key))
    for name, found in sorted(ranges.items()):
        found.sort()
        for (_, end, left), (start, _, right) in pairwise(found):
            if start < end:
                report.error(
                    "shared-bytes",
                    checkpoint.root / name,
                    f"{left} and {right} share the bytes from {start}",
                    "one of them loads the other's data",
                )


def check_names(checkpoint: Checkpoint, report: Report) -> None:
    """Report wrapper parts in tensor names, and pickled names outside the allow-list."""
    for wrapper, count in wrappers_of(checkpoint).items():
        if wrapper != "_flat_param":
            report.warning(
                "wrapped-name",
                checkpoint.path,
                f"{count} names contain {wrapper!r}",
                "a model without that wrapper finds none of them with strict=False",
            )
    nests: dict[Nest, dict[str, tuple[int, ...]]] = {}
    for entry in checkpoint.section("model"):
        nests.setdefault(nest_of(entry.path), {})[name_in(entry.path)] = entry.shape
    pairs = [pair for shapes in nests.values() for pair in twins(shapes)]
    if pairs:
        report.warning(
            "wrapped-name",
            checkpoint.path,
            f"{counted(len(pairs), 'name')} {'is' if len(pairs) == 1 else 'are'} there with and without a part module: "
            f"{listed([' and '.join(pair) for pair in pairs])}",
            "they may be one parameter, saved once from inside DDP, and a model has it only once",
        )
    for name in checkpoint.opaque:
        report.error("unsafe", checkpoint.path, f"a pickle asks for {name}", "torch.load(weights_only=False) and DCP run it")


def check_manifest(checkpoint: Checkpoint, report: Report) -> Manifest | None:
    """Check that the manifest can be read and its files exist with the right sizes; return the manifest, or None."""
    if not checkpoint.path.is_dir():
        return None
    try:
        found = manifest.read(checkpoint.path)
    except CheckpointError as error:
        report.error(
            "bad-manifest",
            checkpoint.path / manifest.MANIFEST_FILE,
            error,
            "nothing tells a complete checkpoint from a damaged one",
        )
        return None
    if found is None:
        if checkpoint.step is not None:
            report.error(
                "unpublished", checkpoint.path, "the step has no manifest: its save did not finish", "torch loads it all the same"
            )
        return None
    known = {finding.where for finding in report.findings if finding.code in ("missing-file", "short-file")}
    for name, total in found.files.items():
        size = _size(checkpoint.path / name)
        if size < 0 and str(checkpoint.path / name) not in known:
            report.error("missing-file", checkpoint.path / name, "the manifest names this file, which is missing", "a load fails")
        elif size >= 0 and size != total.size and str(checkpoint.path / name) not in known:
            report.error(
                "changed-size",
                checkpoint.path / name,
                f"it has {size} bytes and {total.size} were written",
                "a load fails, or reads other bytes",
            )
    return found


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1
