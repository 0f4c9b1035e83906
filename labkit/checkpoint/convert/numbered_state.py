"""Renaming of optimizer state from numbers (by position) to the parameters' names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.checkpoint.checks.moments import Models, Piece, misshapen
from labkit.checkpoint.contents.contents import Contents, OutTensor, OutValue, read_values
from labkit.checkpoint.contents.entry_names import DROP_ADVICE, is_group_parameters, map_state_names, split_in, split_state
from labkit.checkpoint.contents.flat import ParameterList, Stretch, units_of
from labkit.checkpoint.contents.sources import EntrySource
from labkit.checkpoint.convert.flat_moments import check_flat_moments, concatenated, join_pieces, split_flat_moments
from labkit.checkpoint.convert.optimizer_order import ORDER_ADVICE, Meaning, Numbering, alike, by_model, by_order, with_units_of
from labkit.checkpoint.convert.order_names import Reading, read_orders
from labkit.checkpoint.convert.several_optimizers import Order, orders_of
from labkit.checkpoint.data.rank_shares import model_shapes, moment_shares
from labkit.checkpoint.errors import CheckpointMismatchError, FQNMismatchError
from labkit.checkpoint.index.model import Checkpoint, Path_
from labkit.checkpoint.index.names import canonical_fqn, canonical_names, match_names, names_without_wrappers
from labkit.checkpoint.index.sections import is_moment_piece, parameters_of_group
from labkit.checkpoint.wording import counted


def name_numbers(
    contents: Contents, parameters: ParameterList | None, order: Order | None, where: Mapping[str, list[Stretch]]
) -> None:
    """Rename numbered optimizer state to the parameters' names, one optimizer at a time.

    Args:
        contents: Changed in place.
        parameters: The model's parameters, if there is a model.
        order: Names of parameters or flat parameters, in the order in which the optimizer received them; a dict by optimizer if
            there are several.
        where: For each unit, the parameters in its flat parameter.

    Raises:
        FQNMismatchError: The numbers have no names, or the names do not match.
        CheckpointMismatchError: A piece of state does not have its parameter's shape.
    """
    groups = [item for item in contents.values if is_group_parameters(item)]
    ids = read_values(contents, groups, drop_advice=DROP_ADVICE)
    numbered = [item for item in groups if ids[item.key] and all(isinstance(number, int) for number in ids[item.key])]
    if not numbered or parameters is None:
        _refuse_shares(contents)
    if not numbered:
        if order is not None:
            _refuse_idle_order(contents)
        return
    optimizers: dict[Path_, list[OutValue]] = {}
    for group in numbered:
        optimizers.setdefault(group.path[: group.path.index("param_groups")], []).append(group)
    own = {root: _own_names(contents, groups, ids, parameters) for root, groups in optimizers.items()}
    numbers = {root: [number for group in groups for number in ids[group.key]] for root, groups in optimizers.items()}
    orders = orders_of(contents.checkpoint.path, order, numbers, {root for root in own if own[root] is not None}, parameters)
    plain = {} if where else {root: names for root, names in orders.items() if own[root] is None}
    readings = read_orders(contents, plain, numbers, parameters)
    for root, groups in optimizers.items():
        _name_optimizer(contents, root, groups, ids, parameters, orders.get(root), own[root], where, readings.get(root, []))


def _name_optimizer(
    contents: Contents,
    root: Path_,
    groups: Sequence[OutValue],
    ids: Mapping[str, Any],
    parameters: ParameterList | None,
    order: Sequence[str] | None,
    own: Mapping[int, str] | None,
    where: Mapping[str, list[Stretch]],
    readings: Sequence[Reading],
) -> None:
    known = readings[0].names if readings else _known_names(contents.checkpoint, parameters)
    numbering = _numbering(contents, root, [ids[item.key] for item in groups], known, where)
    if order is not None and parameters is not None:
        numbering = with_units_of(numbering, order, parameters, int(contents.checkpoint.metadata.get("ranks", 1)))
    meaning = _meaning(contents, numbering, parameters, order, own)
    if meaning.units:
        held = {number: numbering.units[unit] for number, unit in meaning.units.items()}
        members = {number: [stretch.name for stretch in stretches] for number, stretches in held.items()}
        check_flat_moments(contents, numbering, meaning)
        split_flat_moments(contents, root, held)
    else:
        names = meaning.parameters
        members = {number: [name] for number, name in names.items()}
        map_state_names(contents, lambda name: names[int(name)] if name.isdigit() else name, root)
    places = {item.path: index for index, item in enumerate(contents.values)}
    for group in groups:
        listed = [name for number in ids[group.key] for name in members[number]]
        for path in (group.path, (*group.path[:-1], "param_names")):
            if path in places:
                contents.values[places[path]] = OutValue(path, group.section, listed)
    if parameters is not None:
        join_pieces(contents, root, parameters)
    shapes = [parameters.shapes] if parameters is not None else [reading.shapes for reading in readings]
    _check_moments(contents, root, shapes or model_shapes(contents.checkpoint))


def _own_names(
    contents: Contents, groups: Sequence[OutValue], ids: Mapping[str, Any], parameters: ParameterList | None
) -> dict[int, str] | None:
    """Return the names that the optimizer stored beside its numbers (``param_names``); None if it stored none."""
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
            problems=[f"each rank's file has a share of {key}, and nothing says where it belongs" for key in shares],
            advice="Name the model that they belong to, model=... (--model FILE.py:FUNCTION), and keep the "
            "optimizer's param_groups.",
        )


def _refuse_idle_order(contents: Contents) -> None:
    states = [split[1] for item in contents.items if item.section == "optimizer" and (split := split_state(item.path)) is not None]
    if any(name.isdigit() for name in states):
        problem = "its optimizer state has numbers, and no param_groups that list them"
    else:
        problem = "its optimizer state has names" if states else "it has no optimizer state, or that is left out"
    raise FQNMismatchError(
        contents.checkpoint.path, problems=[f"{problem}: an order has no effect"], advice="Leave the order out (--order)."
    )


def _numbering(
    contents: Contents,
    root: Path_,
    groups: Sequence[Sequence[int]],
    names: Mapping[str, str],
    where: Mapping[str, list[Stretch]],
) -> Numbering:
    checkpoint = contents.checkpoint
    lengths: dict[int, int] = {}
    held = set()
    for item in contents.items:
        split = split_in(root, item)
        if split is None or not split[1].isdigit():
            continue
        held.add(int(split[1]))
        if isinstance(item, OutTensor) and isinstance(item.source, EntrySource) and is_moment_piece(item.source.entry):
            lengths[int(split[1])] = concatenated(item.source.entry).numel
    numbers = {number for group in groups for number in group}
    strange = sorted(held - numbers)
    if strange:
        raise FQNMismatchError(
            checkpoint.path,
            problems=[f"the optimizer has state of its parameter {number}, which is in none of its groups" for number in strange],
            advice="Groups and state are not from one save. Leave them out with drop=[...] (--drop), or use another checkpoint.",
        )
    if len(held) < len(numbers):
        contents.notes.append(f"{counted(len(numbers - held), 'parameter')} of the optimizer's groups had no state")
    units = units_of(checkpoint)
    # Each rank's share of a moment is padded to the same length; the flat parameter's own length may lack that padding.
    padded = {unit: range(units[unit].numel, units[unit].numel + len(units[unit].chunks)) for unit in where}
    return Numbering(checkpoint.path, groups, lengths, names, where, padded)


def _known_names(checkpoint: Checkpoint, parameters: ParameterList | None) -> dict[str, str]:
    """Map the names that numbers may mean, with or without wrappers, to those without: the model's names, else the checkpoint's."""
    if parameters is not None:
        return {name: name for name in parameters.shapes} | dict(parameters.tied)
    names: dict[str, str] = {}
    for model in model_shapes(checkpoint):
        clean = names_without_wrappers(model)
        names |= {canonical_fqn(name): found for name, found in clean.items()} | {found: found for found in clean.values()}
    return names


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
                    f"order names {told.parameters.get(n)} where the optimizer itself has recorded {own[n]}" for n in against[:8]
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


def _check_moments(contents: Contents, root: Path_, models: Models) -> None:
    """Compare pieces' shapes with those of the model's parameters, or of the checkpoint's."""
    pieces: list[Piece] = []
    beside: dict[str, set[str]] = {}
    for item in contents.items:
        split = split_in(root, item)
        if split is not None:
            beside.setdefault(split[1], set()).add(split[2])
            if isinstance(item, OutTensor):
                pieces.append(Piece(item.key, split[1], split[2], item.source.shape))
    wrong = [
        f"{piece.key} has shape {piece.shape}, and the parameter has {shape}"
        for piece, shape in misshapen(pieces, beside, models, permuted=True)
    ]
    if wrong:
        raise CheckpointMismatchError(
            contents.checkpoint.path,
            wrong,
            advice=f"The names are not in the optimizer's order. {ORDER_ADVICE}",
        )
