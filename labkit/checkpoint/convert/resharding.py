"""Resharding of a checkpoint for another number of ranks or another mesh, without a process group."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from labkit.base.progress import task
from labkit.checkpoint.checks.findings import Gate
from labkit.checkpoint.contents.contents import Contents, OutTensor, OutValue, read_values, refuse_unsupported
from labkit.checkpoint.contents.entry_names import split_state
from labkit.checkpoint.contents.source_contents import contents_of
from labkit.checkpoint.contents.ties import tie_note, tied_tensors
from labkit.checkpoint.contents.trainer_shards import refuse_shards
from labkit.checkpoint.convert.engine import Result, check_destination, open_source, run
from labkit.checkpoint.data.rank_shares import is_flat, moment_shares
from labkit.checkpoint.errors import CheckpointError, FQNMismatchError
from labkit.checkpoint.formats.dcp_versions import fields_for, form_note
from labkit.checkpoint.index.layout import Placement, ShardDim, coordinate_of, local_box
from labkit.checkpoint.index.model import Checkpoint
from labkit.checkpoint.index.sections import name_in
from labkit.checkpoint.write.dcp_directory import DcpWriter
from labkit.checkpoint.write.out_files import OutFile, Piece, Ties
from labkit.spmd.shards.layouts import DATA_AXES, parse_mesh

_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class ShardRule:
    """A rule to shard the tensors of matching parameters along one dim over one mesh axis.

    Attributes:
        axis: The mesh axis, such as ``tp``.
        pattern: Parameter names, with ``*``; optimizer state follows its parameter.
        dim: The tensor dim.
    """

    axis: str
    pattern: str
    dim: int


def parse_rule(text: str) -> ShardRule:
    """Parse ``tp:*.w1.weight=0`` into axis, pattern and dim.

    Raises:
        CheckpointError: The text is not of this form.
    """
    axis, colon, rest = text.partition(":")
    pattern, equals, dim = rest.rpartition("=")
    if not (axis and colon and pattern and equals and re.fullmatch(r"-?[0-9]{1,3}", dim)):
        raise CheckpointError(f"cannot read the rule {text!r}. Write it like 'tp:*.w1.weight=0'.")
    return ShardRule(axis.strip(), pattern.strip(), int(dim))


def reshard(
    source: str | Path,
    destination: str | Path,
    mesh: int | str | Mapping[str, int],
    *,
    rules: Sequence[ShardRule] = (),
    workers: int = 4,
    despite: Sequence[str] = (),
    for_torch: str | None = None,
) -> Result:
    """Write a DCP checkpoint in which each rank of the next job reads one file from end to end.

    The boxes of rank ``r`` are in ``__r_0.distcp``, in the order of the names. A box that several ranks hold is in the lowest
    rank's file.

    Args:
        source: As for :func:`open_checkpoint`; it is only read.
        destination: A path that must not exist; it appears complete, by one rename. After a killed run, start over.
        mesh: The number of ranks, or a mesh's axes and sizes, outermost first; text such as ``dp=4,tp=2`` also works. Axes called
            dp, fsdp, shard, dp_shard or data shard dim 0 of everything, as ``fully_shard`` does. Other axes replicate unless one of
            ``rules`` shards them.
        rules: What the other axes shard. If a data axis and an inner axis both shard a dim, the inner axis splits it first, as in
            FSDP2 over tensor parallelism.
        workers: Files that are written at the same time.
        despite: As for :func:`labkit.checkpoint.migrate`. ``unsafe`` has no effect here: a value that torch would run is never
            copied, and only ``migrate`` can leave it out.
        for_torch: As for :func:`labkit.checkpoint.migrate`.

    Raises:
        FQNMismatchError: There are flat parameters, or moments split over the ranks' files: migrate first.
        CheckpointError: The mesh cannot be parsed; a rule names an unknown axis, or a dim that a tensor does not have; also as for
            :func:`labkit.checkpoint.migrate`.

    Ranks: local. Tensor data in memory stay below twice the largest tensor plus 64 MiB.
    """
    source, destination = Path(source), Path(destination)
    axes = _axes(mesh)
    fields = None if for_torch is None else fields_for(for_torch)
    gate = Gate.of(source, despite)
    check_destination(source, destination)
    strange = [rule.axis for rule in rules if rule.axis not in axes or rule.axis in DATA_AXES]
    if strange or prod(axes.values()) < 1:
        raise CheckpointError(
            f"a rule names the axis {strange[0]!r}. It may name an axis of the mesh ({', '.join(axes)}) that does not shard data."
            if strange
            else f"the mesh {axes} has no ranks. Every axis has at least 1."
        )
    checkpoint = open_source(source, gate)
    refuse_shards(checkpoint, checkpoint)
    _refuse_shares(checkpoint)
    contents = contents_of(checkpoint)
    refuse_unsupported(contents, advice="Leave it out with labkit checkpoint migrate OLD NEW --drop. Then reshard the result.")
    tied = _tied(contents, axes, rules)
    files = _files(contents, axes, rules, tied)
    names = {_name(tensor) for tensor in contents.tensors if tensor.section != "other"}
    patterns = {f"{rule.axis}:{rule.pattern}": rule.pattern for rule in rules}
    contents.note_idle("shard", patterns, lambda pattern: bool(fnmatch.filter(names, patterns[pattern])))
    writer = DcpWriter(files, plain=_plain(contents), tied=tied, fields=fields)
    contents.notes += form_note(fields)
    options = {"mesh": axes, "for_torch": for_torch, "rules": [[rule.axis, rule.pattern, rule.dim] for rule in rules]}
    with task("reshard", checkpoint.size_bytes) as writing:
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


def _refuse_shares(checkpoint: Checkpoint) -> None:
    shares = [entry for entry in checkpoint.tensors.values() if is_flat(entry)] or moment_shares(checkpoint)
    if shares:
        raise FQNMismatchError(
            checkpoint.path,
            problems=[f"{entry.key} is a flat vector in pieces, and does not say what is in it" for entry in shares],
            advice="Take it apart first: labkit checkpoint migrate OLD NEW --model FILE.py:FUNCTION. Then reshard the result.",
        )


def _axes(mesh: int | str | Mapping[str, int]) -> dict[str, int]:
    if isinstance(mesh, int):
        axes = {"dp": mesh}
    else:
        try:
            axes = parse_mesh(mesh) if isinstance(mesh, str) else dict(mesh)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    if prod(axes.values()) > _MOST_RANKS:
        raise CheckpointError(f"the mesh has more than {_MOST_RANKS:,} ranks, each of which would get a file of its own")
    return axes


def _plain(contents: Contents) -> Mapping[str, object]:
    # Values in a DCP directory are copied byte for byte; values from elsewhere are read and pickled.
    wanted = [value for value in contents.values if value.entry is None or not value.entry.length]
    return read_values(contents, wanted, drop_advice="Migrate it first, with drop=[...] (--drop).")


def _tied(contents: Contents, axes: Mapping[str, int], rules: Sequence[ShardRule]) -> Ties:
    """Return the tensors that are tied to another and sharded like it, so that their bytes are written only once."""
    tensors = {tensor.key: tensor for tensor in contents.tensors}
    owners = {
        key: owner
        for key, owner in tied_tensors(contents.tensors).items()
        if _placements(contents, tensors[key], axes, rules) == _placements(contents, tensors[owner], axes, rules)
    }
    contents.notes += tie_note("tied, and written once", owners)
    return {key: (tensors[key], owner) for key, owner in owners.items()}


def _files(contents: Contents, axes: Mapping[str, int], rules: Sequence[ShardRule], tied: Ties) -> list[OutFile]:
    num_ranks = prod(axes.values())
    files = [OutFile(f"__{rank}_0.distcp") for rank in range(num_ranks)]
    for tensor in contents.tensors:
        if tensor.key in tied:
            continue
        placements = _placements(contents, tensor, axes, rules)
        shape = tensor.source.shape
        taken = set()
        for rank in range(num_ranks):
            box = local_box(shape, tuple(axes.values()), coordinate_of(rank, tuple(axes.values())), placements)
            if box not in taken and (0 not in box[1] or 0 in shape):
                taken.add(box)
                files[_owner(tensor, rank, num_ranks)].pieces.append(Piece(tensor, box))
            if not any(placement is not None for placement in placements):
                break
    for value in contents.values:
        files[_owner(value, 0, num_ranks)].values.append(value)
    kept = [file for file in files if file.pieces or file.values]
    if not kept:
        raise CheckpointError(f"{contents.checkpoint.path}: there is nothing to write")
    return kept


def _owner(item: OutTensor | OutValue, rank: int, num_ranks: int) -> int:
    """Return the rank whose file gets an item: a per-rank value goes to its own rank, or to rank 0 if that rank is gone."""
    for part in item.path:
        if isinstance(part, str) and part.startswith("rank_") and part.removeprefix("rank_").isdigit():
            own = int(part.removeprefix("rank_"))
            return own if own < num_ranks else 0
    return rank


def _name(tensor: OutTensor) -> str:
    split = split_state(tensor.path) if tensor.section == "optimizer" else None
    return split[1] if split is not None else name_in(tensor.path)


def _placements(contents: Contents, tensor: OutTensor, axes: Mapping[str, int], rules: Sequence[ShardRule]) -> list[Placement]:
    shape = tensor.source.shape
    name = _name(tensor)
    if not shape or tensor.section == "other":
        return [None] * len(axes)
    inner: list[Placement] = []
    for axis in axes:
        rule = next((rule for rule in rules if rule.axis == axis and fnmatch.fnmatchcase(name, rule.pattern)), None)
        if rule is not None and not -len(shape) <= rule.dim < len(shape):
            raise CheckpointError(f"the rule {rule.axis}:{rule.pattern}={rule.dim} does not fit {name}, which has shape {shape}")
        inner.append(None if rule is None else ShardDim(rule.dim % len(shape)))
    names = list(axes)
    result: list[Placement] = []
    for index, axis in enumerate(names):
        if axis in DATA_AXES:
            later = any(placement is not None and placement.dim == 0 for placement in inner[index + 1 :])
            result.append(ShardDim(0, strided=later))
        else:
            result.append(inner[index])
    return result
