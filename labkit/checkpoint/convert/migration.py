"""Migration of any checkpoint into one that FSDP2, DCP, torch.load or safetensors reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from labkit.base.progress import task
from labkit.checkpoint.checks.findings import Gate
from labkit.checkpoint.checks.verification import check_ranks
from labkit.checkpoint.checks.verify_against import ModelSource, build_model
from labkit.checkpoint.contents.contents import Contents, OutTensor, left_out, read_values, top_level
from labkit.checkpoint.contents.entry_names import DROP_ADVICE
from labkit.checkpoint.contents.flat import ParameterList
from labkit.checkpoint.contents.source_contents import contents_of
from labkit.checkpoint.contents.ties import lost_ties, tie_note, tied_tensors
from labkit.checkpoint.convert.engine import Result, check_destination, open_source, run
from labkit.checkpoint.convert.rename import Rule
from labkit.checkpoint.convert.several_optimizers import Order
from labkit.checkpoint.convert.transform import Options, transform
from labkit.checkpoint.data.rank_copies import Copies
from labkit.checkpoint.errors import CheckpointError, CheckpointMismatchError
from labkit.checkpoint.formats.dcp_versions import fields_for, form_note
from labkit.checkpoint.index.sections import name_in, nest_of, nest_text
from labkit.checkpoint.wording import quoted
from labkit.checkpoint.write.out_files import OutFile, Ties, Writer, whole
from labkit.checkpoint.write.safetensors_writer import SafetensorsWriter
from labkit.checkpoint.write.torch_writer import TorchWriter

Format = Literal["dcp", "safetensors", "torch"]
DEFAULT_FILE_BYTES = 1 << 29
DEFAULT_SHARD_BYTES = 5 * 10**9
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def migrate(
    source: str | Path,
    destination: str | Path,
    *,
    to: Format | None = None,
    model: ModelSource | None = None,
    order: Order | None = None,
    rules: Sequence[Rule] = (),
    parts: Sequence[tuple[str, str]] = (),
    only: Sequence[str] = (),
    drop: Sequence[str] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
    copies: Copies = "refuse",
    shard_bytes: int | None = None,
    workers: int = 4,
    despite: Sequence[str] = (),
    for_torch: str | None = None,
) -> Result:
    """Migrate a checkpoint into another format, streaming.

    FSDP1's FULL, SHARDED and LOCAL forms, in one file or one per rank, take the form that FSDP2 loads with
    :mod:`torch.distributed.checkpoint.state_dict`: canonical names, optimizer state by FQN. Schedulers, counters and random states
    are kept; entries that differ between rank files are keyed by rank.

    Args:
        source: As for :func:`open_checkpoint`; it is only read.
        destination: A path that must not exist. It appears, complete and verified, by one rename at the end. A killed run leaves
            ``destination.partial``, which the same call removes before it starts over.
        to: The format; by default the suffix decides between ``safetensors`` and ``torch``, and without one it is ``dcp``.
            Safetensors hold only the tensors of one model, so if the source has more, ``only`` must say what to keep. A safetensors
            destination without a suffix becomes a directory of shards with an index.
        model: The model, or what builds it: a function, ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``. Needed for LOCAL flat
            parameters and for optimizer state numbered by position. It also supplies missing names of tied tensors.
        order: The names of the optimizer's parameters in the optimizer's order, if that differs from the model's (several parameter
            groups). For FSDP1's flat parameters: their names, or the names of the parameters in them. If several optimizers number
            their parameters, a dict: ``{"g_optimizer": [...], "d_optimizer": [...]}``.
        rules: Rename rules, from :func:`labkit.checkpoint.convert.rename.read_rules`.
        parts: Names and paths of the checkpoints in ``source`` to combine into one, see
            :func:`labkit.checkpoint.formats.catalog.open_parts`.
        only: Top-level keys to keep, such as ``model``; ``.`` means tensors outside any dict.
        drop: Patterns of keys to leave out.
        dtypes: Maps patterns of parameter names to dtypes; finite values that would become inf or NaN are refused.
        copies: See :func:`labkit.checkpoint.contents.source_contents.contents_of`.
        shard_bytes: The largest size of a file; by default 512 MiB for DCP, 5 GB for safetensors.
        workers: Files that are written at the same time.
        despite: Codes of errors of :func:`labkit.checkpoint.verify` to accept (:data:`labkit.checkpoint.checks.findings.CODES`).
            Any other error in the entries to copy stops the migration before anything is written; one in the result stops it before
            the destination appears. An index written by another version of Python or torch is no obstacle: the copy is written for
            the installed versions.
        for_torch: The version of torch, such as ``2.13``, that is to read a DCP directory; by default the installed one.

    Returns:
        A summary of what was written.

    Raises:
        CheckpointExistsError: The destination exists.
        AmbiguousCheckpointError: The source can be read in several ways.
        CheckpointError: The format cannot hold some entries, and they were not left out; or the destination is inside the source,
            or its suffix contradicts the format.
        UnsafeCheckpointError, IncompleteCheckpointError, CorruptCheckpointError: The source is unsafe or incomplete, or its bytes
        do not match the checksums that torch wrote. CheckpointFormatError: The source has no format that labkit supports, or
        changed while it was read
            (:mod:`labkit.checkpoint.formats.source_files` has the rule).
        FQNMismatchError, CheckpointMismatchError, RankDivergenceError, DtypeNarrowingError: See the arguments.
        VerificationError: ``verify`` finds errors in the source or in the result that ``despite`` does not name.
        CheckpointWriteError: The destination cannot be written, or does not read back.

    Ranks: local. Tensor data in memory stay below twice the largest tensor plus 64 MiB. Data that are only moved are copied in
    blocks of 4 MiB per worker.
    """
    if to is not None and to not in get_args(Format):
        raise CheckpointError(
            f"to={to!r} is not a format. Use 'dcp' (what FSDP2 loads), 'safetensors' (the model's tensors only) or 'torch'."
        )
    source, destination = Path(source), Path(destination)
    chosen = _format_of(destination, to)
    if for_torch is not None and chosen != "dcp":
        raise CheckpointError(
            f"for_torch={for_torch!r} (--for-torch) is for DCP directories: {chosen} files are the same for every torch."
        )
    fields = None if for_torch is None else fields_for(for_torch)
    gate = Gate.of(source, despite)
    check_destination(source, destination)
    checkpoint = open_source(source, gate, parts)
    built = build_model(model)
    parameters = None if built is None else ParameterList.of(built)
    contents = contents_of(checkpoint, copies=copies, only=only, drop=drop)
    try:
        contents = transform(contents, Options(parameters, order, rules, drop, dtypes or {}))
    except CheckpointMismatchError:
        check_ranks(checkpoint, gate)  # report a missing file instead, if there is one
        raise
    writer = _writer(contents, chosen, destination, shard_bytes, fields)
    contents.notes += form_note(fields)
    options: dict[str, Any] = {
        "to": chosen,
        "rules": [asdict(rule) for rule in rules],
        "parts": [list(part) for part in parts],
        "only": list(only),
        "drop": list(drop),
        "for_torch": for_torch,
        "dtypes": {pattern: str(dtype) for pattern, dtype in (dtypes or {}).items()},
    }
    with task("migrate", checkpoint.size_bytes) as writing:
        return run(
            writer,
            checkpoint,
            destination,
            options,
            workers=workers,
            progress=writing.advance,
            gate=gate,
            notes=tuple(contents.notes),
        )


def _format_of(destination: Path, to: Format | None) -> Format:
    suffix = destination.suffix.lower()
    meant: Format | None = "safetensors" if suffix == ".safetensors" else "torch" if suffix in _TORCH_SUFFIXES else None
    if to is not None:
        if meant is not None and meant != to:
            raise CheckpointError(f"{destination}: the format {to!r} (--to {to}) and the suffix {suffix} contradict each other.")
        return to
    if meant is None and suffix != ".dcp" and re.fullmatch(r"\.[a-z][a-z0-9]*", suffix):  # but not a name like llama-3.1-8b
        raise CheckpointError(
            f"{destination}: the suffix {suffix} names no format. Files end in .safetensors or {', '.join(_TORCH_SUFFIXES)}; a "
            "DCP directory has no suffix. For any other name, say the format with to=... (--to dcp, safetensors or torch)."
        )
    return meant or "dcp"


def _writer(contents: Contents, to: Format, destination: Path, shard_bytes: int | None, fields: int | None) -> Writer:
    if not contents.tensors:
        raise CheckpointError(
            f"{contents.checkpoint.path}: there is no tensor to write. Look with show at what it holds, and check what drop leaves."
        )
    contents.notes += tie_note("no longer tied, since they get different dtypes or names", lost_ties(contents.tensors))
    if to != "safetensors":
        contents.notes += tie_note("tied, and written once", tied_tensors(contents.tensors))
    if to == "dcp":
        from labkit.checkpoint.write.dcp_directory import DcpWriter  # imports all of DCP, which the other formats do not need

        tensors, tied = _apart(contents.tensors)
        files = bins(tensors, shard_bytes or DEFAULT_FILE_BYTES)
        outs = [OutFile(f"__0_{index}.distcp", [whole(tensor) for tensor in part]) for index, part in enumerate(files)]
        outs[0].values = list(contents.values)
        plain = read_values(contents, contents.values, drop_advice=DROP_ADVICE)
        return DcpWriter(outs, plain=plain, tied=tied, fields=fields)
    if to == "torch":
        plain = read_values(contents, contents.values, drop_advice=DROP_ADVICE)
        file = OutFile(destination.name, [whole(tensor) for tensor in contents.tensors], list(contents.values))
        return TorchWriter([file], destination.name, plain)
    return _safetensors(contents, destination, shard_bytes)


def _safetensors(contents: Contents, destination: Path, shard_bytes: int | None) -> Writer:
    models = [item for item in contents.tensors if item.section == "model"]
    nests = list(dict.fromkeys(nest_of(item.path) for item in models))
    if not nests:
        raise CheckpointError(f"{contents.checkpoint.path}: it has no model tensors, and safetensors hold nothing else.")
    rest = [item for item in contents.items if item.section != "model" or nest_of(item.path) != nests[0]]
    if rest:
        inside = [item.key for item in rest if top_level(item) == nest_text(nests[0])]
        chosen = " or ".join(f"--only {quoted(nest_text(nest))}" for nest in nests)
        raise CheckpointError(
            f"{contents.checkpoint.path}: safetensors hold the tensors of one model and nothing else, but this is more than "
            f"{nest_text(nests[0])}: {left_out(rest)}. "
            + (f"Leave it out with drop={inside[:1]!r} (--drop {quoted(inside[0])})." if inside else f"Say what to keep: {chosen}.")
        )
    tensors = [replace(item, path=(name_in(item.path),)) for item in models]
    note = "tied, and held under one name, as transformers expects it"
    contents.notes += [f"{text} (noted in the metadata)" for text in tie_note(note, tied_tensors(tensors))]
    tensors, tied = _apart(tensors)
    if destination.suffix == ".safetensors":
        return SafetensorsWriter([OutFile(destination.name, [whole(tensor) for tensor in tensors])], destination.name, tied=tied)
    parts = bins(tensors, shard_bytes or DEFAULT_SHARD_BYTES)
    count = len(parts)
    files = [
        OutFile(f"model-{index:05d}-of-{count:05d}.safetensors", [whole(tensor) for tensor in part])
        for index, part in enumerate(parts, start=1)
    ]
    return SafetensorsWriter(files, tied=tied)


def _apart(tensors: Sequence[OutTensor]) -> tuple[list[OutTensor], Ties]:
    """Return the tensors that own their bytes, and those tied to them."""
    owners = tied_tensors(tensors)
    return [item for item in tensors if item.key not in owners], {
        item.key: (item, owners[item.key]) for item in tensors if item.key in owners
    }


def bins(tensors: Sequence[OutTensor], limit: int) -> list[list[OutTensor]]:
    """Divide tensors, in order, into files of at most ``limit`` bytes; a larger tensor gets its own file."""
    result: list[list[OutTensor]] = [[]]
    size = 0
    for tensor in tensors:
        piece = whole(tensor).size_bytes
        if result[-1] and size + piece > limit:
            result.append([])
            size = 0
        result[-1].append(tensor)
        size += piece
    return result
