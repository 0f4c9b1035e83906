"""Lookup of the parameter, or FSDP1's flat parameter, that each number in an optimizer's state means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod

from labkit.checkpoint.contents.flat import ParameterList, Stretch, aligned
from labkit.checkpoint.errors import FQNMismatchError
from labkit.checkpoint.index.names import FLAT_PARAMETER, canonical_fqn
from labkit.checkpoint.wording import counted

ORDER_ADVICE = (
    "List the names of the optimizer's parameters, in its order: order=[...] (--order FILE, one a line; "
    "`labkit checkpoint migrate --help` shows how to write it)."
)


@dataclass(frozen=True)
class Meaning:
    """The meaning of an optimizer's numbers: either all are parameters, or all are flat parameters.

    Attributes:
        parameters: Number to name.
        units: Number to the unit of the flat parameter.
    """

    parameters: Mapping[int, str] = field(default_factory=dict)
    units: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Numbering:
    """An optimizer's numbers, and what is known about them.

    Attributes:
        path: The checkpoint, for messages.
        groups: The numbers in each parameter group.
        lengths: Each number, mapped to its moments' number of elements, if the moments are vectors in pieces.
        names: Names that numbers may mean, if known, mapped to canonical names; a tied name maps to its first one.
        units: The parameters in each flat parameter, by unit.
        padded: For each unit, the lengths that its flat parameter's state may have.
    """

    path: object
    groups: Sequence[Sequence[int]]
    lengths: Mapping[int, int]
    names: Mapping[str, str]
    units: Mapping[str, Sequence[Stretch]]
    padded: Mapping[str, range]

    @property
    def numbers(self) -> list[int]:
        """All numbers in ascending order, which is the order of the groups."""
        return sorted(number for group in self.groups for number in group)

    def fit(self, units: Sequence[str]) -> bool:
        """Return whether each number's state is as long as its unit's flat parameter."""
        pairs = dict(zip(self.numbers, units, strict=False))
        return len(units) == len(self.numbers) and all(
            self.lengths[number] in self.padded[pairs[number]] for number in self.lengths
        )


def with_units_of(numbering: Numbering, order: Sequence[str], parameters: ParameterList, num_ranks: int) -> Numbering:
    """Return a numbering extended by the flat parameters that an order names, for a checkpoint whose model has none.

    A SHARDED or FULL model saved with the optimizer's own state_dict() gives such a checkpoint: only the moments are flat. An
    optimizer has flat parameters only with ``use_orig_params=False``, where FSDP1 puts parameters into one flat parameter only if
    all or none of them are trainable. It stores them back to back, and pads to a multiple of the number of ranks. So a named unit
    holds the trainable parameters below it that no inner named unit holds or, if none is trainable, all of those parameters.

    Raises:
        FQNMismatchError: The model has no parameters in such a unit.
    """
    names = [canonical_fqn(name) for name in order]
    units = [name.removesuffix(FLAT_PARAMETER).rstrip(".") for name in names if name.rpartition(".")[2] == FLAT_PARAMETER]
    if numbering.units or not units:
        return numbering
    held: dict[str, list[str]] = {unit: [] for unit in units}
    for name in parameters.shapes:
        inside = [unit for unit in held if not unit or name.startswith(unit + ".")]
        if inside:
            held[max(inside, key=len)].append(name)
    empty = [unit for unit in held if not held[unit]]
    if empty:
        problems = [f"order names {unit}.{FLAT_PARAMETER}, and the model has no parameters there" for unit in empty]
        raise FQNMismatchError(numbering.path, problems=problems, advice="Correct the names in the order (--order FILE).")
    trained = {unit: [name for name in names if name in parameters.trainable] or names for unit, names in held.items()}
    layouts = {unit: aligned(names, parameters, 1) for unit, names in trained.items()}
    lengths = {unit: end + -end % num_ranks for unit, (_, end) in layouts.items()}
    return replace(
        numbering,
        units={unit: stretches for unit, (stretches, _) in layouts.items()},
        padded={unit: range(length, length + 1) for unit, length in lengths.items()},
    )


def by_order(numbering: Numbering, order: Sequence[str], parameters: ParameterList | None) -> Meaning:
    """Determine the meaning from the names that the user gives in the optimizer's order.

    They are parameter names. If the optimizer had flat parameters, the names may be those of flat parameters, or of the parameters
    in them; then each flat parameter takes the position of its first parameter.

    Raises:
        FQNMismatchError: A name is unknown or occurs twice, or there are too few or too many names.
    """
    names = [canonical_fqn(name) for name in order]
    flat = [name for name in names if name.rpartition(".")[2] == FLAT_PARAMETER]
    if flat and numbering.units:
        if len(flat) != len(names):
            problem = f"order names both flat parameters ({flat[0]}) and others"
            raise FQNMismatchError(numbering.path, problems=[problem], advice=ORDER_ADVICE)
        units = [name.removesuffix(FLAT_PARAMETER).rstrip(".") for name in names]
        _check_known(numbering, names, {f"{unit}.{FLAT_PARAMETER}".lstrip(".") for unit in numbering.units}, "checkpoint")
        _check_count(numbering, len(units))
        return Meaning(units=dict(zip(numbering.numbers, units, strict=True)))
    if numbering.units:
        owner = {stretch.name: unit for unit, stretches in numbering.units.items() for stretch in stretches}
        units = list(dict.fromkeys(owner[name] for name in names if name in owner))
        as_parameters = len(names) == len(numbering.numbers) and _parameters_fit(numbering, names, parameters)
        as_units = len(units) == len(numbering.numbers) and (numbering.fit(units) or len(names) != len(units))
        if as_units and not as_parameters:
            _check_known(numbering, names, numbering.names, "model")
            return Meaning(units=dict(zip(numbering.numbers, units, strict=True)))
    _check_count(numbering, len(names))
    if numbering.names or flat:
        _check_known(numbering, names, numbering.names, "checkpoint" if parameters is None else "model")
        names = [numbering.names[name] for name in names]
    _check_twice(numbering, names)
    return Meaning(parameters=dict(zip(numbering.numbers, names, strict=True)))


def by_model(numbering: Numbering, parameters: ParameterList) -> Meaning:
    """Determine the meaning from the model's own order of all parameters, or of the trainable ones.

    Raises:
        FQNMismatchError: The optimizer had several groups, or a different number of parameters.
    """
    used = [group for group in numbering.groups if group]
    if len(used) > 1:
        raise FQNMismatchError(
            numbering.path,
            problems=[
                f"its optimizer has {len(used)} parameter groups and numbers instead of names: the model's order does not say "
                "which parameter is in which group"
            ],
            advice=ORDER_ADVICE,
        )
    every = list(parameters.shapes)
    trainable = [name for name in every if name in parameters.trainable]
    units = list(numbering.units)
    trained = [unit for unit in units if any(stretch.name in parameters.trainable for stretch in numbering.units[unit])]
    for chosen in (units, trained):
        if chosen and numbering.fit(chosen):
            return Meaning(units=dict(zip(numbering.numbers, chosen, strict=True)))
    for names in (every, trainable):
        if len(names) == len(numbering.numbers):
            return Meaning(parameters=dict(zip(numbering.numbers, names, strict=True)))
    for chosen in (trained, units):
        if len(chosen) == len(numbering.numbers):  # some moments do not match; check_flat_moments reports them
            return Meaning(units=dict(zip(numbering.numbers, chosen, strict=True)))
    flat = f" in {counted(len(units), 'flat parameter')} ({len(trained)} of them trainable)" if units else ""
    raise FQNMismatchError(
        numbering.path,
        problems=[
            f"its optimizer had {counted(len(numbering.numbers), 'parameter')}, and the model has {len(every)} "
            f"({len(trainable)} of them trainable){flat}"
        ],
        advice=ORDER_ADVICE,
    )


def alike(shapes: Iterable[object]) -> int:
    """Count the items whose shape occurs more than once."""
    return sum(count for count in Counter(shapes).values() if count > 1)


def _parameters_fit(numbering: Numbering, names: Sequence[str], parameters: ParameterList | None) -> bool:
    shapes = parameters.shapes if parameters is not None else {}
    pairs = dict(zip(numbering.numbers, (numbering.names.get(name, name) for name in names), strict=True))
    return all(pairs[number] in shapes and prod(shapes[pairs[number]]) == length for number, length in numbering.lengths.items())


def _check_count(numbering: Numbering, given: int) -> None:
    expected = len(numbering.numbers)
    if given != expected:
        what = f"{counted(expected, 'parameter')}, and {counted(given, 'name')} are in the order"
        if numbering.units:
            what += f"; the checkpoint has {counted(len(numbering.units), 'flat parameter')}"
        raise FQNMismatchError(numbering.path, problems=[f"its optimizer had {what}"], advice=ORDER_ADVICE)


def _check_known(numbering: Numbering, names: Sequence[str], known: Iterable[str], whose: str) -> None:
    known = set(known)
    problems: list[str] = []
    for name in names:
        if name not in known:
            # Each search compares all names, so limit the number of searches: a message lists only a few.
            near = get_close_matches(name, known, 1) if len(problems) < FQNMismatchError.max_listed else []
            hint = f" (did you mean {near[0]}?)" if near else ""
            problems.append(f"order names {name}, but the {whose} has no such parameter{hint}")
    if problems:
        raise FQNMismatchError(numbering.path, problems=problems, advice="Correct the names in the order (--order FILE).")
    _check_twice(numbering, names)


def _check_twice(numbering: Numbering, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise FQNMismatchError(
            numbering.path,
            problems=[f"order names {name} twice" for name in twice],
            advice="An optimizer has each parameter once. Correct the order (--order FILE).",
        )
