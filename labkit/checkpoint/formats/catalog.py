"""Opening of any checkpoint: detect its format and read its index. No code in the file is run, and no tensor is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from labkit.checkpoint.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
)
from labkit.checkpoint.files.plain_files import open_regular, refuse_special
from labkit.checkpoint.files.staging_leftovers import START_OVER, is_partial, partial_folder
from labkit.checkpoint.formats.counted_names import gap_of_one, gaps
from labkit.checkpoint.formats.dcp_format import METADATA_FILE, read_dcp
from labkit.checkpoint.formats.parts import (
    INDEX_SUFFIX,
    Part,
    check_numbered,
    format_of,
    listed_in,
    only_part,
    parts_of,
)
from labkit.checkpoint.formats.patterns import is_pattern, matching_files
from labkit.checkpoint.formats.rank_files import missing_ranks
from labkit.checkpoint.formats.safetensors_format import read_safetensors
from labkit.checkpoint.formats.torch_format import indexed_files, read_torch
from labkit.checkpoint.formats.unread_files import unread_files
from labkit.checkpoint.index import manifest, sections
from labkit.checkpoint.index.model import Checkpoint, ChunkTable, TensorEntry, ValueEntry, tie
from labkit.checkpoint.pickles.safe_pickle import Unknown
from labkit.checkpoint.wording import listed, quoted

_UNFINISHED = f"is being written by a run of migrate or reshard, or was left unfinished by one. {START_OVER}"


def open_checkpoint(path: str | Path, *, unknown: Unknown = "refuse") -> Checkpoint:
    """Read a checkpoint's index, whatever program wrote it.

    Args:
        path: A DCP directory, a store made by :func:`labkit.checkpoint.save` (its latest complete step is opened), a
            torch.save file or a directory of them, or safetensors (a file, an index, a directory). A pattern such as
            ``old/step_100_rank_{rank}.pt`` names the files of ranks; ``*`` matches any text.
        unknown: Whether to ``refuse`` a pickle that names anything outside the allow-list, or to keep such parts ``opaque``: listed
            but not read. Neither runs anything.

    Returns:
        The checkpoint's entries with the byte ranges of their data.

    Raises:
        CheckpointNotFoundError: Nothing is there, or the store has no complete step.
        AmbiguousCheckpointError: There are several checkpoints, or files that may form one or several; the error lists them.
        UnsafeCheckpointError: A pickle names something outside the allow-list.
        IncompleteCheckpointError: Part of the index is missing or cut off.
        CheckpointFormatError: The file is not a checkpoint that labkit supports, or it is a FIFO, socket or device.

    Ranks: local. Blocks while it reads the indices; tensor data are not read.
    """
    path = Path(path)
    if not path.exists() and is_pattern(path):
        return _finished(_read_pattern(path, unknown), None)
    if not path.exists():
        beside = partial_folder(path)
        raise CheckpointNotFoundError(
            path, "there is no such file or directory" + (f". {beside} {_UNFINISHED}" if is_partial(beside) else "")
        )
    refuse_special(path)
    if path.is_dir() and is_partial(path):
        raise IncompleteCheckpointError(path, f"it {_UNFINISHED}", advice="")
    return read_checkpoint(path, unknown=unknown)


def read_checkpoint(path: Path, *, unknown: Unknown = "refuse") -> Checkpoint:
    """Read an index as :func:`open_checkpoint` does, even if a run is still writing the checkpoint."""
    step = manifest.step_of(path)
    if path.is_dir() and manifest.is_store(path):
        path = manifest.latest(path)
        step = manifest.step_of(path)
    return _finished(_read(path, unknown), step)


def _finished(checkpoint: Checkpoint, step: int | None) -> Checkpoint:
    checkpoint.step = step
    sections.classify(checkpoint)
    if checkpoint.kind in ("torch", "safetensors") and not checkpoint.index and not checkpoint.ranks:
        _find_gaps(checkpoint)
    if checkpoint.kind == "dcp":
        # Only labkit writes ties this way. Optimizer state has no ties, so there two entries in one place are an error.
        tie(checkpoint.section("model"))
    return checkpoint


def _find_gaps(checkpoint: Checkpoint) -> None:
    names = list(checkpoint.files)
    weights = {entry.key for entry in checkpoint.section("model")}

    def other_weights(file: Path) -> bool:
        try:
            other = _read_file(file, "opaque")
        except (CheckpointError, OSError):
            return False
        sections.classify(other)
        theirs = {entry.key for entry in other.section("model")}
        return bool(theirs and weights) and not theirs & weights

    checkpoint.gaps = gaps(names, checkpoint.root)
    if len(names) == 1 and (gap := gap_of_one(names[0], checkpoint.root, other_weights)) is not None:
        checkpoint.gaps.append(gap)
    checkpoint.notes += [gap.what for gap in checkpoint.gaps if gap.severity == "warning"]


def _read(path: Path, unknown: Unknown) -> Checkpoint:
    if path.is_file():
        return _read_file(path, unknown)
    if any(path.glob("__*_*.distcp")) and not (path / METADATA_FILE).exists():
        raise IncompleteCheckpointError(
            path, "it has .distcp files and no .metadata: the save into it did not finish, or .metadata was not copied along"
        )
    part = only_part(path)
    checkpoint = _read_part(path, part, unknown)
    checkpoint.notes += unread_files(path, {*part.files, *checkpoint.files, part.name})
    return checkpoint


def _read_part(path: Path, part: Part, unknown: Unknown) -> Checkpoint:
    if part.format == "dcp":
        return read_dcp(path, unknown=unknown)
    if part.name.endswith(INDEX_SUFFIX):
        return _with_path(_read_file(path / part.name, unknown), path)
    if part.format == "safetensors":
        return read_safetensors(path, part.files)
    return read_torch(path, path, part.files, unknown=unknown)


def _with_path(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    checkpoint.path = path
    return checkpoint


def _read_file(path: Path, unknown: Unknown) -> Checkpoint:
    if path.name == METADATA_FILE or path.suffix == ".distcp":
        return read_dcp(path.parent, unknown=unknown)
    if path.name.endswith(INDEX_SUFFIX):
        listed = listed_in(path) or []
        check_numbered(path.parent, listed)
        if listed and not all(name.endswith(".safetensors") for name in listed):
            checkpoint = read_torch(path, path.parent, indexed_files(path), unknown=unknown)
        else:
            checkpoint = read_safetensors(path)
        checkpoint.index = path.name
        return checkpoint
    kind = format_of(path)
    if kind == "safetensors":
        return read_safetensors(path)
    if kind == "torch" or path.stat().st_size == 0 or _begins_like_torch(path):
        return read_torch(path, path.parent, [path.name], unknown=unknown)
    raise CheckpointFormatError(path, "it is not a torch.save file, a safetensors file or DCP metadata")


def _begins_like_torch(path: Path) -> bool:
    with open_regular(path) as file:
        magic = file.read(2)
    return magic == b"PK" or magic[:1] == b"\x80"


def _read_pattern(pattern: Path, unknown: Unknown) -> Checkpoint:
    root, files, ranks = matching_files(pattern)
    formats = {format_of(root / name) for name in files}
    if formats == {"safetensors"}:
        checkpoint = read_safetensors(pattern, files, root)
        if ranks is not None:
            checkpoint.ranks = dict(ranks)
            checkpoint.missing_ranks = missing_ranks(pattern, checkpoint.ranks.values())
        return checkpoint
    if formats != {"torch"}:
        raise CheckpointFormatError(pattern, f"the {len(files)} files that match are not of one format ({files[0]}, ...)")
    return read_torch(pattern, root, files, ranks=ranks, together=True, unknown=unknown)


# -- checkpoints assembled from parts ----------------------------------------------------------------------------------


def open_parts(root: Path, parts: Sequence[tuple[str, str]], *, unknown: Unknown = "refuse") -> Checkpoint:
    """Read several checkpoints in one directory as one.

    Args:
        root: The directory.
        parts: For each part, the name to prefix to its entries (may be empty), and its path in the directory, as
            :func:`open_checkpoint` takes it. The prefix is not repeated if the part holds only a dict of that name.
        unknown: As for :func:`open_checkpoint`.

    Raises:
        CheckpointFormatError: Two parts have entries of the same name, or a part is outside the directory.
        CheckpointError: A part cannot be read.

    Ranks: local.
    """
    whole = Checkpoint(path=root, root=root, kind="parts")
    for given, relative in parts:
        try:
            part = open_checkpoint(root / relative, unknown=unknown)
        except AmbiguousCheckpointError as error:
            raise error.seen_from(root) from None
        if not part.root.resolve().is_relative_to(root.resolve()):
            raise CheckpointFormatError(root, f"the part {relative} lies elsewhere. Name the directory that holds all parts.")
        name = given
        if given and _top_level_keys(part) == {given}:
            name = ""
            whole.notes.append(f"the part {relative} holds {given} and nothing else, and is taken as it is")
        _add_part(whole, name, part)
    sections.classify(whole)
    read = set(whole.files)
    folders = {name.partition("/")[0] for name in read if "/" in name}
    every = parts_of(root)
    left = [part.text for part in every if part.name not in read | folders and not read & set(part.files)]
    whole.notes += [f"left out, since no --part names it: {text}" for text in left]
    for files in (part.files for part in every if read & set(part.files)):
        if rest := [name for name in files if name not in read]:
            whole.notes.append(f"left out, since no --part names {'it' if len(rest) == 1 else 'them'}: {listed(rest, most=8)}")
    whole.notes += unread_files(root, read.union(*(part.files for part in every), (part.name for part in every)))
    return whole


def _top_level_keys(part: Checkpoint) -> set[str]:
    """Return the keys of a checkpoint's top-level dicts, plus ``.`` if tensors or values are outside them."""
    entries: list[TensorEntry | ValueEntry] = [*part.tensors.values(), *part.values.values()]
    return {str(entry.path[0]) if len(entry.path) > 1 else "." for entry in entries}


def _add_part(whole: Checkpoint, name: str, part: Checkpoint) -> None:
    shift = part.root.resolve().relative_to(whole.root.resolve()).as_posix()
    head = (name,) if name else ()

    def key_of(key: str) -> str:
        return f"{name}.{key}" if name else key

    def file_of(file: str) -> str:
        return file if shift == "." else f"{shift}/{file}"

    def table_of(table: ChunkTable) -> ChunkTable:
        return table if shift == "." else table.in_directory(shift)

    for key in (*part.tensors, *part.values):
        if key_of(key) in whole.tensors or key_of(key) in whole.values:
            named = quoted(f"NAME={part.path.name}")
            raise CheckpointFormatError(
                whole.root,
                f"two parts have an entry {key_of(key)!r}, and labkit does not join them. To keep both, give one a name, which is "
                f"then put before all its entries: --part {named}",
            )
    for key, entry in part.tensors.items():
        whole.tensors[key_of(key)] = replace(
            entry,
            key=key_of(key),
            path=(*head, *entry.path),
            chunks=table_of(entry.chunks),
            replicas=tuple(map(table_of, entry.replicas)),
            tied_to=None if entry.tied_to is None else key_of(entry.tied_to),
        )
    for key, value in part.values.items():
        whole.values[key_of(key)] = replace(value, key=key_of(key), path=(*head, *value.path), file=file_of(value.file))
    whole.files |= {file_of(file): size for file, size in part.files.items()}
    whole.records |= {file_of(file): records for file, records in part.records.items()}
    whole.ranks |= {file_of(file): rank for file, rank in part.ranks.items()}
    whole.missing_ranks = tuple(sorted({*whole.missing_ranks, *part.missing_ranks}))
    whole.opaque = tuple(sorted({*whole.opaque, *part.opaque}))
    whole.conflicts |= {key_of(key): text for key, text in part.conflicts.items()}
    whole.notes += part.notes
    whole.parts.append(part)
    if "ranks" in part.metadata:
        whole.metadata["ranks"] = max(part.metadata["ranks"], whole.metadata.get("ranks", 0))
    if "transforms" in part.metadata:
        whole.metadata["transforms"] = part.metadata["transforms"]
