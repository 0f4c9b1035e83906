"""Tied tensors in transit to another checkpoint: several names in a model for the same tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from labkit.checkpoint.contents.contents import Contents, OutTensor
from labkit.checkpoint.contents.flat import ParameterList
from labkit.checkpoint.contents.sources import CastSource, Source
from labkit.checkpoint.data.read import Reader, same_bits
from labkit.checkpoint.errors import CheckpointMismatchError
from labkit.checkpoint.index.sections import name_in, nest_of
from labkit.checkpoint.wording import listed, quoted

_BLOCK_BYTES = 1 << 24


def tied_tensors(tensors: Sequence[OutTensor]) -> dict[str, str]:
    """Map the key of each model tensor that repeats an earlier one to the key of the first.

    Tensors are tied if several names have the same source. Optimizer state is ignored: a shared step count is not a tie.
    """
    return _same_source(tensors, lambda source: source.label)


def _same_source(tensors: Sequence[OutTensor], label: Callable[[Source], str]) -> dict[str, str]:
    first: dict[tuple[str, tuple[int, ...]], str] = {}
    found: dict[str, str] = {}
    for item in tensors:
        shape = item.source.shape
        if item.section == "model" and shape and 0 not in shape:
            owner = first.setdefault((label(item.source), shape), item.key)
            if owner != item.key:
                found[item.key] = owner
    return found


def lost_ties(tensors: Sequence[OutTensor]) -> dict[str, str]:
    """Return the source's ties that break because the dtype changes under only one of the names."""
    kept = tied_tensors(tensors)
    before = _same_source(tensors, lambda source: source.inner.label if isinstance(source, CastSource) else source.label)
    return {key: owner for key, owner in before.items() if key not in kept}


def tie_note(what: str, tied: Mapping[str, str]) -> list[str]:
    """Return a list with one sentence about ties; empty if there are none."""
    return [f"{what}: {listed([f'{key} = {owner}' for key, owner in tied.items()])}"] if tied else []


def complete_ties(contents: Contents, parameters: ParameterList | None) -> None:
    """Add the missing names of the model's tied parameters, all with the same source.

    Some of FSDP1's forms have only one of the names, and DCP stores the data once per name.

    Raises:
        CheckpointMismatchError: Both names exist, and their data differ.
    """
    if parameters is None:
        return
    by_name = {
        (nest_of(item.path), name_in(item.path)): index for index, item in enumerate(contents.tensors) if item.section == "model"
    }
    aliases: dict[str, list[str]] = defaultdict(list)
    for alias, first in parameters.tied.items():
        aliases[first].append(alias)
    with Reader(contents.checkpoint, checksums=True) as reader:
        for nesting, name in list(by_name):
            owner = parameters.tied.get(name, name)
            item = contents.tensors[by_name[nesting, name]]
            for other in (owner, *aliases.get(owner, ())):
                at = by_name.get((nesting, other))
                if at is None:
                    by_name[nesting, other] = len(contents.tensors)
                    contents.tensors.append(replace(item, path=(*nesting, other)))
                elif other == owner and name != owner and contents.tensors[at].source.label != item.source.label:
                    _require_equal(contents, reader, item, contents.tensors[at], name, owner)
                    contents.tensors[by_name[nesting, name]] = replace(item, source=contents.tensors[at].source)


def _require_equal(contents: Contents, reader: Reader, item: OutTensor, first: OutTensor, name: str, owner: str) -> None:
    if not equal(reader, item.source, first.source):
        raise CheckpointMismatchError(
            contents.checkpoint.path,
            [f"{name} and {owner} are one tensor in the model, and differ in the checkpoint"],
            advice=f"Leave one of them out: drop=[{item.key!r}] (--drop {quoted(item.key)}). The other is then used for both.",
        )


def equal(reader: Reader, left: Source, right: Source) -> bool:
    """Return whether two sources have the same bits. Reads both, in blocks of rows of about 16 MiB."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    if not left.shape:
        return same_bits(left.read(reader, (), ()), right.read(reader, (), ()))
    inner = (0,) * (len(left.shape) - 1)
    step = max(1, _BLOCK_BYTES // max(1, prod(left.shape[1:]) * left.dtype.itemsize))
    for row in range(0, left.shape[0], step):
        box = (row, *inner), (min(step, left.shape[0] - row), *left.shape[1:])
        if not same_bits(left.read(reader, *box), right.read(reader, *box)):
            return False
    return True
