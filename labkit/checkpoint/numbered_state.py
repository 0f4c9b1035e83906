"""Give optimizer state that is numbered by position the parameters' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from labkit.checkpoint.contents import Contents, OutTensor, OutValue, read_values
from labkit.checkpoint.entry_names import DROP_ADVICE, is_group_parameters, map_state_names, split_state
from labkit.checkpoint.errors import CheckpointMismatchError, FQNMismatchError
from labkit.checkpoint.flat import ParameterList, Stretch
from labkit.checkpoint.model import Chunk, ChunkTable, TensorEntry
from labkit.checkpoint.names import canonical_fqn
from labkit.checkpoint.sources import EntrySource, FlatSource


def name_numbers(
    contents: Contents, parameters: ParameterList | None, order: Sequence[str] | None, where: Mapping[str, list[Stretch]]
) -> None:
    """Bring numbered optimizer state, if there is any, under the parameters' names.

    Args:
        contents: Changed in place.
        parameters: The model's.
        order: Parameter names in the order that the optimizer was given them.
        where: What lies in each flat parameter.

    Raises:
        FQNMismatchError: There are no names for the numbers, or not as many.
        CheckpointMismatchError: A piece of state does not have its parameter's shape.
    """
    groups = [item for item in contents.values if is_group_parameters(item)]
    ids = read_values(contents, groups, drop_advice=DROP_ADVICE)
    numbered = [item for item in groups if ids[item.key] and all(isinstance(number, int) for number in ids[item.key])]
    if not numbered:
        return
    numbers = sorted(number for item in numbered for number in ids[item.key])
    if where and len(numbers) == len(where) and order is None:
        # use_orig_params=False: the optimizer saw the flat parameters, in the order of the units.
        members = {number: [stretch.name for stretch in where[unit]] for number, unit in zip(numbers, where, strict=True)}
        _split_flat_moments(contents, dict(zip(numbers, where.values(), strict=True)))
    else:
        names = _names_by_number(contents, [ids[item.key] for item in numbered], parameters, order)
        members = {number: [name] for number, name in names.items()}
        map_state_names(contents, lambda name: names.get(int(name), name) if name.isdigit() else name)
    for index, item in enumerate(contents.values):
        if item in numbered:
            listed = [name for number in ids[item.key] for name in members[number]]
            contents.values[index] = OutValue(item.path, item.section, listed)
    if parameters is not None:
        _join_pieces(contents, parameters)
        _check_moments(contents, parameters)


def _split_flat_moments(contents: Contents, stretches: Mapping[int, list[Stretch]]) -> None:
    """Give each parameter its stretch of a flat moment, and its own copy of what is one per flat parameter (``step``)."""
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
    for index, value in reversed(list(enumerate(contents.values))):
        split = split_state(value.path) if value.section == "optimizer" else None
        if split is not None and split[1].isdigit():
            nesting, number, piece = split
            copies = [replace(value, path=(*nesting, stretch.name, piece)) for stretch in stretches[int(number)]]
            contents.values[index : index + 1] = copies


def _names_by_number(
    contents: Contents, groups: Sequence[Sequence[int]], parameters: ParameterList | None, order: Sequence[str] | None
) -> dict[int, str]:
    path = contents.checkpoint.path
    numbers = [number for group in groups for number in group]
    if order is None and parameters is not None:
        if sum(bool(group) for group in groups) > 1:
            raise FQNMismatchError(
                path,
                unexpected=[f"optimizer state numbered over {len(groups)} parameter groups"],
                advice="The model's order does not say how its parameters were divided into groups. List the names in the "
                "optimizer's order: order=[...] (--order FILE, one a line).",
            )
        every = list(parameters.shapes)
        trainable = [name for name in every if name in parameters.trainable]
        order = every if len(every) == len(numbers) else trainable
    if order is None:
        raise FQNMismatchError(
            path,
            unexpected=["optimizer state that is numbered by position"],
            advice="Name the parameters: model=... (--model FILE.py:FUNCTION), or order=[...] in the optimizer's order "
            "(--order FILE, one name a line).",
        )
    if len(order) != len(numbers):
        raise FQNMismatchError(
            path,
            unexpected=[f"optimizer state of {len(numbers)} parameters, and {len(order)} names were given"],
            advice="Give the names of the parameters that the optimizer had, in its order: order=[...] (--order FILE).",
        )
    return dict(zip(sorted(numbers), (canonical_fqn(name) for name in order), strict=True))


def _join_pieces(contents: Contents, parameters: ParameterList) -> None:
    """Put together what each rank's file has of a moment: 1-D pieces of the flattened parameter, in rank order."""
    joined: list[OutTensor] = []
    for item in contents.tensors:
        split = split_state(item.path) if item.section == "optimizer" else None
        shape = parameters.shapes.get(split[1]) if split is not None else None
        source = item.source
        in_pieces = contents.checkpoint.kind == "torch_ranks" and len(source.shape) == 1
        if shape is None or not isinstance(source, EntrySource) or not in_pieces or source.shape == shape:
            joined.append(item)
            continue
        flat = _concatenated(source.entry)
        if flat.numel != prod(shape):
            raise CheckpointMismatchError(
                contents.checkpoint.path,
                [f"{item.key}: its pieces have {flat.numel} elements together, and the parameter has {prod(shape)}"],
                advice="Keep the files of all ranks together, and name the model that they were saved from.",
            )
        joined.append(replace(item, source=FlatSource(flat, 0, shape)))
    contents.tensors = joined


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
            advice="The names are in another order than the optimizer's. Give them with order=[...] (--order FILE).",
        )
