"""Lookup of the parameters that an order lists: which model it belongs to, and under which names its state is written.

| the names of an order | are read as | and written |
| --- | --- | --- |
| all are in one dict of tensors, as they are or prefixed with the dict's own name (``netD.``) | parameters of that model; the \
dict that holds the optimizer comes first, then those around it | as in that dict |
| they are in several dicts | parameters of several models | as they are given |
| with a model, ``--model`` | its parameters | as in the model |

If several dicts have an order's names (two networks of one class), the order may mean any dict that no other order takes. It is an
error if two optimizers would have one parameter, or if names could be written in two ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches

from labkit.checkpoint.checks.moments import COUNTERS, MOMENTS
from labkit.checkpoint.contents.contents import Contents, OutTensor
from labkit.checkpoint.contents.entry_names import split_in
from labkit.checkpoint.contents.flat import ParameterList
from labkit.checkpoint.data.models_beside import ModelBeside, models_beside
from labkit.checkpoint.errors import FQNMismatchError
from labkit.checkpoint.index.model import Path_
from labkit.checkpoint.index.names import FLAT_PARAMETER, canonical_fqn, flat_key
from labkit.checkpoint.wording import listed

_CORRECT = "Correct the names in the order (--order FILE)."
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Reading:
    """One possible meaning of an order's names.

    Attributes:
        names: Maps each given name, without wrappers, to the name to write.
        keys: Maps each given name, without wrappers, to the parameter's full key, including the dicts around it.
        shapes: Maps each name to write to its shape.
    """

    names: Mapping[str, str]
    keys: Mapping[str, str]
    shapes: Shapes


@dataclass(frozen=True)
class _Given:
    """An order, with what is known about it."""

    root: Path_
    names: Sequence[str]
    levels: Sequence[Sequence[ModelBeside]]
    wanted: Mapping[str, tuple[int, ...]]  # the shapes that moments show


def read_orders(
    contents: Contents,
    orders: Mapping[Path_, Sequence[str]],
    numbers: Mapping[Path_, Sequence[int]],
    parameters: ParameterList | None,
) -> dict[Path_, list[Reading]]:
    """Return each order's possible readings, by this module's table; all readings of one order write the same names.

    Args:
        contents: The checkpoint's contents.
        orders: Names by optimizer. An order of flat parameters, or of a different length than the optimizer's, has no reading.
        numbers: The optimizers' own numbers.
        parameters: The model's parameters, if there is a model.

    Raises:
        FQNMismatchError: A name is unknown, the names could be written in two ways, or two optimizers would have one parameter.
    """
    readings: dict[Path_, list[Reading]] = {}
    unknown: list[_Given] = []
    for root, order in orders.items():
        names = [canonical_fqn(name) for name in order]
        levels = _levels(contents, root, parameters)
        flat = any(name.rpartition(".")[2] == FLAT_PARAMETER for name in names)
        if flat or len(names) != len(numbers[root]) or not levels[-1]:
            continue
        shapes = _moment_shapes(contents, root)
        pairs = zip(sorted(numbers[root]), names, strict=True)
        given = _Given(root, names, levels, {name: shapes[number] for number, name in pairs if number in shapes})
        found = list(_readings(given))
        if found:
            readings[root] = [reading for reading in found if _fits(reading, given)] or found
            _refuse_two_ways(contents, given, readings[root])
        else:
            unknown.append(given)
    for given in unknown:
        _refuse_unknown(contents, given, readings, "checkpoint" if parameters is None else "model")
    _refuse_shared(contents, readings)
    return readings


def _levels(contents: Contents, root: Path_, parameters: ParameterList | None) -> list[list[ModelBeside]]:
    levels = models_beside(contents.checkpoint, root)
    if parameters is None:
        return levels
    names = {name: name for name in parameters.shapes} | dict(parameters.tied)
    places = [model.where for model in levels[-1] if parameters.shapes.keys() <= model.shapes.keys()]
    return [[ModelBeside(place, names, dict(parameters.shapes)) for place in places or [""]]]


def _readings(given: _Given) -> Iterator[Reading]:
    for level in given.levels:
        found = [reading for model in level if (reading := _in_one(given.names, model)) is not None]
        if found:
            yield from found
            return
    if (reading := _in_several(given.names, given.levels[-1])) is not None:
        yield reading


def _in_one(names: Sequence[str], model: ModelBeside) -> Reading | None:
    for head in model.heads:
        if all(name.startswith(head) and name[len(head) :] in model.names for name in names):
            written = {name: model.names[name[len(head) :]] for name in names}
            return Reading(written, {name: model.key(inside) for name, inside in written.items()}, model.shapes)
    return None


def _in_several(names: Sequence[str], level: Sequence[ModelBeside]) -> Reading | None:
    written: dict[str, str] = {}
    keys: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        found = [
            (model, head) for model in level for head in model.heads if name[len(head) :] in model.names and name.startswith(head)
        ]
        if len(found) != 1:
            return None
        ((model, head),) = found
        inside = model.names[name[len(head) :]]
        written[name], keys[name] = head + inside, model.key(inside)
        shapes[head + inside] = model.shapes[inside]
    return Reading(written, keys, shapes)


def _fits(reading: Reading, given: _Given) -> bool:
    return all(reading.shapes.get(reading.names[name]) == shape for name, shape in given.wanted.items())


def _moment_shapes(contents: Contents, root: Path_) -> dict[int, tuple[int, ...]]:
    """Return the shapes of those numbered parameters that have whole elementwise moments."""
    pieces: dict[str, set[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for item in contents.items:
        split = split_in(root, item)
        if split is not None and split[1].isdigit():
            pieces.setdefault(split[1], set()).add(split[2])
            if isinstance(item, OutTensor) and split[2] in MOMENTS:
                shapes[split[1]] = item.source.shape
    shared = len(contents.checkpoint.ranks) > 1  # then a vector may be just one rank's share
    return {
        int(number): shape
        for number, shape in shapes.items()
        if (MOMENTS | COUNTERS).issuperset(pieces[number]) and not (shared and len(shape) == 1)
    }


def _refuse_two_ways(contents: Contents, given: _Given, readings: Sequence[Reading]) -> None:
    ways = {tuple(reading.names.values()): next(iter(reading.keys.values())) for reading in readings}
    if len(ways) > 1:
        raise FQNMismatchError(
            contents.checkpoint.path,
            problems=[f"{given.names[0]} in the order for {flat_key(given.root)} may be {' or '.join(ways.values())}"],
            advice="Write the names with those of the dicts around them, as shown here.",
        )


def _refuse_unknown(contents: Contents, given: _Given, readings: Mapping[Path_, Sequence[Reading]], whose: str) -> None:
    # If an order may mean several models, it is unknown which parameters it takes.
    taken = {key for found in readings.values() if len(found) == 1 for key in found[0].keys.values()}
    models = [model for level in given.levels for model in level]
    known = [
        (head + name, model.key(inside), model.shapes.get(inside))
        for model in models
        for head in model.heads
        for name, inside in model.names.items()
    ]
    every = {spelled for spelled, _, _ in known}
    problems: list[str] = []
    for name in given.names:
        if name not in every:
            shape = given.wanted.get(name)
            # Each search compares all names, so limit the number of searches: a message lists only a few.
            few = len(problems) < FQNMismatchError.max_listed
            free = [spelled for spelled, key, its in known if few and key not in taken and shape in (None, its)]
            near = _nearest(name, free)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            problems.append(f"order names {name}, but the {whose} has no such parameter{hint}")
    places = listed(list(dict.fromkeys(model.where or "." for model in models)), most=8)
    raise FQNMismatchError(
        contents.checkpoint.path,
        problems=problems or [f"none of {places} has all names of the order for {flat_key(given.root)}, and some are in several"],
        advice=_CORRECT if problems else "Prefix each name with that of its dict.",
    )


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return the closest name, or several if they are equally close."""
    found = get_close_matches(name, dict.fromkeys(known), 4)
    ratios = [SequenceMatcher(None, other, name).ratio() for other in found]
    return [other for other, ratio in zip(found, ratios, strict=True) if ratio == ratios[0]]


def _refuse_shared(contents: Contents, readings: Mapping[Path_, Sequence[Reading]]) -> None:
    """Raise :class:`FQNMismatchError` if two optimizers would have one parameter under every choice of readings."""
    problems: list[str] = []
    groups: dict[frozenset[str], list[Path_]] = {}
    for at, (root, found) in enumerate(readings.items()):
        groups.setdefault(frozenset(found[0].names.values()), []).append(root)
        for other in list(readings)[:at]:
            both = [set(mine.keys.values()) & set(theirs.keys.values()) for mine in found for theirs in readings[other]]
            if all(both):
                problems += [f"{flat_key(other)} and {flat_key(root)} would both have {key}" for key in sorted(both[0])]
    for roots in groups.values():
        models = {frozenset(reading.keys.values()) for root in roots for reading in readings[root]}
        if len(roots) > len(models) and not problems:
            names = " and ".join(map(flat_key, roots))
            problems.append(f"{names} would have the same parameters, which are in {len(models)} models only")
    if problems:
        raise FQNMismatchError(contents.checkpoint.path, problems=problems, advice=f"A parameter is in one optimizer. {_CORRECT}")
