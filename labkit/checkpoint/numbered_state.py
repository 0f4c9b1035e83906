"""Renaming of optimizer state that is numbered by position to the parameters' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from labkit.checkpoint.contents import Contents, OutTensor, OutValue, read_values
from labkit.checkpoint.coverage import coverage
from labkit.checkpoint.entry_names import DROP_ADVICE, is_group_parameters, map_state_names, split_state
from labkit.checkpoint.errors import CheckpointMismatchError, FQNMismatchError
from labkit.checkpoint.flat import ParameterList, Stretch, units_of
from labkit.checkpoint.model import Chunk, ChunkTable, TensorEntry
from labkit.checkpoint.names import canonical_fqn, canonical_names, match_names
from labkit.checkpoint.optimizer_order import ORDER_ADVICE, Meaning, Numbering, alike, by_model, by_order, with_units_of
from labkit.checkpoint.rank_shares import moment_shares
from labkit.checkpoint.sections import is_moment_piece, name_in, parameters_of_group
from labkit.checkpoint.sources import EntrySource, FlatSource
from labkit.checkpoint.wording import counted, listed


def name_numbers(
    contents: Contents, parameters: ParameterList | None, order: Sequence[str] | None, where: Mapping[str, list[Stretch]]
) -> None:
    """Rename numbered optimizer state, if there is any, to the parameters' names.

    Args:
        contents: Changed in place.
        parameters: The model's parameters.
        order: Names in the order in which the optimizer got them, of parameters or of flat parameters.
        where: The parameters in each flat parameter.

    Raises:
        FQNMismatchError: There are no names for the numbers, or they do not match.
        CheckpointMismatchError: A piece of state does not have its parameter's shape.
    """
    groups = [item for item in contents.values if is_group_parameters(item)]
    ids = read_values(contents, groups, drop_advice=DROP_ADVICE)
    numbered = [item for item in groups if ids[item.key] and all(isinstance(number, int) for number in ids[item.key])]
    if not numbered or parameters is None:
        _refuse_shares(contents)
    if not numbered:
        return
    _refuse_several(contents, numbered, ids)
    numbering = _numbering(contents, [ids[item.key] for item in numbered], parameters, where)
    if order is not None and parameters is not None:
        numbering = with_units_of(numbering, order, parameters, int(contents.checkpoint.metadata.get("ranks", 1)))
    own = _own_names(contents, numbered, ids, parameters)
    meaning = _meaning(contents, numbering, parameters, order, own)
    if meaning.units:
        held = {number: numbering.units[unit] for number, unit in meaning.units.items()}
        members = {number: [stretch.name for stretch in stretches] for number, stretches in held.items()}
        _check_flat_moments(contents, numbering, meaning)
        _split_flat_moments(contents, held)
    else:
        names = meaning.parameters
        members = {number: [name] for number, name in names.items()}
        map_state_names(contents, lambda name: names[int(name)] if name.isdigit() else name)
    keys = {item.key for item in numbered}
    for index, item in enumerate(contents.values):
        if item.key in keys:
            listed = [name for number in ids[item.key] for name in members[number]]
            contents.values[index] = OutValue(item.path, item.section, listed)
            beside = next((at for at, other in enumerate(contents.values) if other.path == (*item.path[:-1], "param_names")), None)
            if beside is not None:
                contents.values[beside] = OutValue(contents.values[beside].path, item.section, listed)
    if parameters is not None:
        _join_pieces(contents, parameters)
        _check_moments(contents, parameters)


def _own_names(
    contents: Contents, groups: Sequence[OutValue], ids: Mapping[str, Any], parameters: ParameterList | None
) -> dict[int, str] | None:
    """Return the names that the optimizer itself stored beside its numbers (``param_names``); None if it has none."""
    lists = {item.path[:-1]: item for item in contents.values if item.section == "optimizer" and item.path[-1] == "param_names"}
    beside = [lists.get(group.path[:-1]) for group in groups]
    found = [item for item in beside if item is not None]
    if len(found) < len(groups):
        return None
    values = read_values(contents, found, drop_advice=DROP_ADVICE)
    raw: dict[int, str] = {}
    for group, item in zip(groups, found, strict=True):
        names = parameters_of_group(values[item.key], f"{contents.checkpoint.path}: {item.key}")
        if len(names) != len(ids[group.key]) or not all(isinstance(name, str) for name in names):
            raise FQNMismatchError(
                contents.checkpoint.path,
                problems=[f"{item.key} does not name each of the parameters that {group.key} numbers"],
                advice=f"Leave it out with drop=[...] (--drop), and name them otherwise. {ORDER_ADVICE}",
            )
        raw |= dict(zip(ids[group.key], map(str, names), strict=True))
    clean = canonical_names(raw.values(), contents.checkpoint.path)
    if parameters is not None:
        clean |= match_names(raw.values(), parameters.shapes)
        strange = [name for name in clean.values() if name not in parameters.shapes and name not in parameters.tied]
        if strange:
            raise FQNMismatchError(
                contents.checkpoint.path,
                unexpected=[f"the optimizer's parameter {name}" for name in strange],
                advice="Name its model.",
            )
    return {number: clean[name] for number, name in raw.items()}


def _refuse_shares(contents: Contents) -> None:
    kept = {item.source.entry.key for item in contents.tensors if isinstance(item.source, EntrySource)}
    shares = [entry.key for entry in moment_shares(contents.checkpoint) if entry.key in kept]
    if shares:
        raise FQNMismatchError(
            contents.checkpoint.path,
            problems=[f"each rank's file has a share of {key}, and not what belongs where" for key in shares],
            advice="Name the model that puts them together, model=... (--model FILE.py:FUNCTION), and keep the "
            "optimizer's param_groups.",
        )


def _refuse_several(contents: Contents, groups: Sequence[OutValue], ids: Mapping[str, Any]) -> None:
    numbers = [number for group in groups for number in ids[group.key]]
    if len(set(numbers)) == len(numbers):
        return
    roots = list(dict.fromkeys(".".join(map(str, group.path[: group.path.index("param_groups")])) for group in groups))
    if len(roots) == 1:
        problem, advice = f"{roots[0]} lists a parameter's number twice", DROP_ADVICE
    else:
        problem = f"{listed(roots)} each number the parameters in their own way, so one number stands for several"
        rest = {root: " ".join(f"--drop '{other}.*'" for other in roots if other != root) for root in roots[:3]}
        each = "; ".join(f"{drops} keeps {root}" for root, drops in rest.items())
        advice = f"Migrate one optimizer at a time, and leave the others out: {each}. {ORDER_ADVICE}"
    raise FQNMismatchError(contents.checkpoint.path, problems=[problem], advice=advice)


def _numbering(
    contents: Contents, groups: Sequence[Sequence[int]], parameters: ParameterList | None, where: Mapping[str, list[Stretch]]
) -> Numbering:
    checkpoint = contents.checkpoint
    lengths: dict[int, int] = {}
    held = set()
    items: list[OutTensor | OutValue] = [*contents.tensors, *contents.values]
    for item in items:
        split = split_state(item.path) if item.section == "optimizer" else None
        if split is None or not split[1].isdigit():
            continue
        held.add(int(split[1]))
        if isinstance(item, OutTensor) and isinstance(item.source, EntrySource) and is_moment_piece(item.source.entry):
            lengths[int(split[1])] = _concatenated(item.source.entry).numel
    numbers = {number for group in groups for number in group}
    strange = sorted(held - numbers)
    if strange:
        raise FQNMismatchError(
            checkpoint.path,
            problems=[f"the optimizer has state of its parameter {number}, which is in none of its groups" for number in strange],
            advice="Groups and state are not of one save. Leave them out with drop=[...] (--drop), or use another checkpoint.",
        )
    if len(held) < len(numbers):
        contents.notes.append(f"{counted(len(numbers - held), 'parameter')} of the optimizer's groups had no state")
    if parameters is not None:
        names = {name: name for name in parameters.shapes} | dict(parameters.tied)
    else:
        names = {name: name for entry in checkpoint.section("model") for name in [canonical_fqn(name_in(entry.path))]}
    units = units_of(checkpoint)
    # Each rank's share of a moment is padded to the same length; the flat parameter's own length may lack that padding.
    padded = {unit: range(units[unit].numel, units[unit].numel + len(units[unit].chunks)) for unit in where}
    return Numbering(checkpoint.path, groups, lengths, names, where, padded)


def _meaning(
    contents: Contents,
    numbering: Numbering,
    parameters: ParameterList | None,
    order: Sequence[str] | None,
    own: Mapping[int, str] | None,
) -> Meaning:
    told = by_order(numbering, order, parameters) if order is not None else None
    if own is not None:
        against = [] if told is None else [n for n, name in told.parameters.items() if own[n] != name]
        if told is not None and (against or told.units):
            raise FQNMismatchError(
                numbering.path,
                problems=[
                    f"order names {told.parameters.get(n)} where the optimizer itself has noted {own[n]}" for n in against[:8]
                ],
                advice="The optimizer's own names (param_names) are right: leave the order out.",
            )
        return Meaning(parameters=own)
    if told is not None:
        return told
    if parameters is None:
        raise FQNMismatchError(
            numbering.path,
            problems=["its optimizer state is numbered by position, and nothing says which parameter each number is"],
            advice=f"Name the model, model=... (--model FILE.py:FUNCTION), or the parameters. {ORDER_ADVICE}",
        )
    meaning = by_model(numbering, parameters)
    shapes: list[object] = [parameters.shapes[name] for name in meaning.parameters.values()]
    shapes += [tuple((part.start, part.shape) for part in numbering.units[unit]) for unit in meaning.units.values()]
    same = alike(shapes)
    if same:
        what = "flat parameters" if meaning.units else "parameters"
        contents.notes.append(
            f"moments were assigned in the model's order; {same} {what} share shapes with others, so a swap would not show"
        )
    return meaning


def _check_flat_moments(contents: Contents, numbering: Numbering, meaning: Meaning) -> None:
    wrong = {
        number: unit
        for number, unit in meaning.units.items()
        if number in numbering.lengths and numbering.lengths[number] not in numbering.padded[unit]
    }
    if not wrong:
        return
    fits_another = all(any(numbering.lengths[number] in lengths for lengths in numbering.padded.values()) for number in wrong)
    raise CheckpointMismatchError(
        contents.checkpoint.path,
        [
            f"state {number} of its optimizer has {numbering.lengths[number]} elements, and the flat parameter of "
            f"{unit or 'the root'} has {numbering.padded[unit].start}"
            for number, unit in wrong.items()
        ],
        advice=f"The names are in another order than the optimizer's. {ORDER_ADVICE}"
        if fits_another
        else "The shares of other ranks are missing. Keep the files of all ranks together; what DCP saved of numbered state is "
        "one rank's share. To go on without it, leave it out with drop=[...] (--drop).",
    )


def _split_flat_moments(contents: Contents, stretches: Mapping[int, Sequence[Stretch]]) -> None:
    """Give each parameter its stretch of a flat moment, and its own copy of state per flat parameter (``step``)."""
    result: list[OutTensor] = []
    for item in contents.tensors:
        split = split_state(item.path) if item.section == "optimizer" else None
        if split is None or not split[1].isdigit() or not isinstance(item.source, EntrySource):
            result.append(item)
            continue
        nesting, number, piece = split
        flat = None if not item.source.shape else _concatenated(item.source.entry)
        for stretch in stretches[int(number)]:
            path = (*nesting, stretch.name, piece)
            source = item.source if flat is None else FlatSource(flat, stretch.start, stretch.shape)
            result.append(replace(item, path=path, source=source))
    contents.tensors = result
    values: list[OutValue] = []
    for value in contents.values:
        split = split_state(value.path) if value.section == "optimizer" else None
        if split is None or not split[1].isdigit():
            values.append(value)
            continue
        nesting, number, piece = split
        values += [replace(value, path=(*nesting, stretch.name, piece)) for stretch in stretches[int(number)]]
    contents.values = values


def _join_pieces(contents: Contents, parameters: ParameterList) -> None:
    """Join the pieces of a moment in the ranks' files: 1-D pieces of the flattened parameter, in rank order."""
    joined: list[OutTensor] = []
    wrong: dict[str, tuple[int, int]] = {}
    for item in contents.tensors:
        split = split_state(item.path) if item.section == "optimizer" else None
        shape = parameters.shapes.get(split[1]) if split is not None else None
        source = item.source
        in_pieces = len(contents.checkpoint.ranks) > 1 and len(source.shape) == 1
        if shape is None or not isinstance(source, EntrySource) or not in_pieces or _is_whole(source.entry, shape):
            joined.append(item)
            continue
        flat = _concatenated(source.entry)
        if flat.numel == prod(shape):
            joined.append(replace(item, source=FlatSource(flat, 0, shape)))
        else:
            wrong[item.key] = flat.numel, prod(shape)
    if wrong:
        sizes = {prod(shape) for shape in parameters.shapes.values()}
        raise CheckpointMismatchError(
            contents.checkpoint.path,
            [
                f"{key}: its pieces have {found} elements together, and the parameter has {size}"
                for key, (found, size) in wrong.items()
            ],
            advice=f"The names are in another order than the optimizer's. {ORDER_ADVICE}"
            if all(found in sizes for found, _ in wrong.values())
            else "Keep the files of all ranks together, and name the model that they were saved from.",
        )
    contents.tensors = joined


def _is_whole(entry: TensorEntry, shape: tuple[int, ...]) -> bool:
    """Return whether each file holds the whole moment or a box with a known place, and not a stretch without a place."""
    if entry.shape != shape or not coverage(entry.chunks, shape).exact:
        return False
    return len(entry.chunks) > 1 or all(chunk.sizes == shape for table in entry.replicas for chunk in table)


def _concatenated(entry: TensorEntry) -> TensorEntry:
    chunks: list[Chunk] = []
    at = 0
    for table in (entry.chunks, *entry.replicas):
        for chunk in table:
            if chunk.numel:
                chunks.append(replace(chunk, offsets=(at,)))
                at += chunk.numel
    return replace(entry, shape=(at,), chunks=ChunkTable.of(chunks, 1), replicas=(), flat=True)


def _check_moments(contents: Contents, parameters: ParameterList) -> None:
    wrong = []
    for item in contents.tensors:
        split = split_state(item.path) if item.section == "optimizer" else None
        shape = parameters.shapes.get(split[1]) if split is not None else None
        if split is not None and shape is not None and item.source.shape not in (shape, ()):
            wrong.append(f"{item.key} has shape {item.source.shape}, and the parameter has {shape}")
    if wrong:
        raise CheckpointMismatchError(
            contents.checkpoint.path,
            wrong,
            advice=f"The names are in another order than the optimizer's. {ORDER_ADVICE}",
        )
