"""The changes that a migration makes: strip wrappers from names, split flat parameters, turn numbers into names, apply rules."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from labkit.checkpoint.contents.contents import Contents, OutTensor, OutValue, refuse_unsupported
from labkit.checkpoint.contents.entry_names import (
    DROP_ADVICE,
    group_names,
    map_group_names,
    map_state_names,
    split_state,
)
from labkit.checkpoint.contents.flat import ParameterList, Stretch, layout, units_of
from labkit.checkpoint.contents.source_contents import near_key
from labkit.checkpoint.contents.sources import CastSource, EntrySource, FlatSource
from labkit.checkpoint.contents.ties import complete_ties
from labkit.checkpoint.convert.model_fit import misfit
from labkit.checkpoint.convert.numbered_state import name_numbers
from labkit.checkpoint.convert.rename import Rule
from labkit.checkpoint.convert.several_optimizers import Order
from labkit.checkpoint.dtypes import is_convertible
from labkit.checkpoint.errors import CheckpointError, CheckpointMismatchError, FQNMismatchError, IncompleteCheckpointError
from labkit.checkpoint.index.coverage import coverage
from labkit.checkpoint.index.model import Checkpoint, TensorEntry
from labkit.checkpoint.index.names import (
    FLAT_PARAMETER,
    WRAPPERS,
    canonical_fqn,
    canonical_names,
    check_unique,
    flat_key,
    match_names,
    twins,
)
from labkit.checkpoint.index.sections import Nest, model_nests, name_in, nest_of
from labkit.checkpoint.wording import counted, listed, quoted


@dataclass(frozen=True)
class Options:
    """The changes to make.

    Attributes:
        parameters: The model's parameters, needed for flat parameters and for state numbered by position.
        order: Names of parameters or flat parameters, in the order in which the optimizer received them; by default the model's
            order of all parameters, or of the trainable ones. For several optimizers, a dict by key.
        rules: Rename rules for canonical parameter names, applied to the model and to its optimizer state alike.
        drop: Patterns of keys that were already left out. The model's names that match one may be missing.
        dtypes: Maps patterns of the model's names to dtypes; the first match wins.
    """

    parameters: ParameterList | None = None
    order: Order | None = None
    rules: Sequence[Rule] = ()
    drop: Sequence[str] = ()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


def transform(contents: Contents, options: Options) -> Contents:
    """Convert contents to the form that FSDP2 and ``torch.distributed.checkpoint.state_dict`` load.

    Raises:
        UnsupportedTensorError: There is a tensor that labkit does not read, and no pattern drops it.
        FQNMismatchError: Names collide, numbered state has no names, or names match the model neither before nor after the
            rename rules.
        CheckpointMismatchError: Shapes do not match the model, or tensors that the model ties differ.
        IncompleteCheckpointError: Other ranks' parts of a flat parameter are missing.

    Ranks: local. Reads values, and tensors that the model ties but the source does not.
    """
    contents = replace(contents, tensors=list(contents.tensors), values=list(contents.values), notes=list(contents.notes))
    _refuse_idle_drops(contents, options.parameters)
    refuse_unsupported(contents, advice=DROP_ADVICE)
    _canonical(contents, options.parameters)
    where = _take_flat_apart(contents, options)
    name_numbers(contents, options.parameters, options.order, where)
    _refuse_flat(contents)
    first = _misfit(contents, options)
    _rename(contents, options.rules)
    if first is not None and (not options.rules or _misfit(contents, options) is not None):
        raise first
    complete_ties(contents, options.parameters)
    _cast(contents, options.dtypes)
    contents.check_unique()
    return contents


def _misfit(contents: Contents, options: Options) -> CheckpointMismatchError | None:
    return None if options.parameters is None else misfit(contents, options.parameters, options.drop)


def _refuse_idle_drops(contents: Contents, parameters: ParameterList | None) -> None:
    """Raise :class:`FQNMismatchError` if a pattern matches nothing in the checkpoint and no name in the model."""
    nests = {"", *(f"{nest[0]}." for nest in model_nests(contents.checkpoint) if nest)}
    known = [nest + name for name in (parameters.tensors if parameters is not None else ()) for nest in nests]
    idle = [pattern for pattern in contents.idle_drops if not fnmatch.filter(known, pattern)]
    if idle:
        raise FQNMismatchError(
            contents.checkpoint.path,
            problems=[f"the drop pattern {pattern!r} matches nothing{near_key(contents, pattern)}" for pattern in idle],
            advice="A pattern of drop=[...] (--drop) matches whole names as show lists them; * matches any text.",
        )


def _canonical(contents: Contents, parameters: ParameterList | None) -> None:
    """Strip wrappers from the names: by the model's names if there is a model, else by the rules of :mod:`names`."""
    nests: dict[Nest, dict[str, tuple[int, ...]]] = {}
    for item in contents.tensors:
        if item.section == "model":
            nests.setdefault(nest_of(item.path), {})[name_in(item.path)] = item.source.shape
    if parameters is None:
        _refuse_twins(contents, nests)
    found = {nest: _canonical_in(contents, list(names), parameters, nest) for nest, names in nests.items()}
    for index, item in enumerate(contents.tensors):
        if item.section == "model":
            contents.tensors[index] = _renamed(item, found[nest_of(item.path)][name_in(item.path)])
    states = [split[1] for item in contents.items if item.section == "optimizer" and (split := split_state(item.path)) is not None]
    states += group_names(contents)
    named = [name for name in dict.fromkeys(states) if not name.isdigit()]
    names = _canonical_in(contents, named, parameters, ("optimizer",))
    map_state_names(contents, lambda name: names.get(name, name))
    map_group_names(contents, lambda name: names.get(name, name))


def _refuse_twins(contents: Contents, nests: Mapping[Nest, Mapping[str, tuple[int, ...]]]) -> None:
    pairs = [[flat_key((*nest, name)) for name in same] for nest, shapes in nests.items() for same in twins(shapes)]
    if pairs:
        heads = {flat_key((*nest, "module")) for nest, shapes in nests.items() if twins(shapes)}
        every = all(key.startswith(f"{head}.") for pair in pairs for key in pair[1:] for head in heads)
        drop = " ".join(f"--drop {quoted(f'{head}.*')}" for head in sorted(heads)) if every else "--drop NAME"
        raise FQNMismatchError(
            contents.checkpoint.path,
            problems=[f"{' and '.join(pair)} may be one parameter, saved once from inside DDP, or two" for pair in pairs],
            advice=f"Name the model, whose names decide: model=... (--model FILE.py:FUNCTION); or leave one of each out: {drop}.",
        )


def _renamed(item: OutTensor, name: str) -> OutTensor:
    """Return a model tensor under a new name. If the name is unchanged, so is the path, including list positions."""
    return item if name == name_in(item.path) else replace(item, path=(*nest_of(item.path), name))


def _canonical_in(contents: Contents, names: Sequence[str], parameters: ParameterList | None, nest: Nest) -> dict[str, str]:
    result = canonical_names(names, contents.checkpoint.path)
    if parameters is not None:
        result |= match_names(names, [*parameters.tensors, *(name for name in parameters.shapes if name not in parameters.tensors)])
        check_unique(result, contents.checkpoint.path)
    wrappers = Counter(part for name, canonical in result.items() for part in WRAPPERS if part in _parts_gone(name, canonical))
    if wrappers:
        counts = ", ".join(f"{part} ({counted(count, 'name')})" for part, count in wrappers.items())
        contents.notes.append(
            f"{'.'.join(map(str, nest)) or 'all tensors'}: parts that wrappers put into names are left out: {counts}"
        )
    dropped = [name for name, canonical in result.items() if canonical_fqn(name) == f"module.{canonical}"]
    if dropped:
        contents.notes.append(
            f"{'.'.join(map(str, nest)) or 'all tensors'}: every name begins with module., as DDP's do, which is left out"
            if parameters is None
            else f"{counted(len(dropped), 'name')} lost its part module., which the model does not have ({dropped[0]}, ...)"
        )
    return result


def _parts_gone(name: str, canonical: str) -> set[str]:
    return set(name.split(".")) - set(canonical.split("."))


# -- FSDP1 LOCAL ------------------------------------------------------------------------------------------------------


def _take_flat_apart(contents: Contents, options: Options) -> dict[str, list[Stretch]]:
    """Replace each flat parameter by the parameters in it, and return their positions by unit."""
    checkpoint = contents.checkpoint
    units = units_of(checkpoint)
    if not units:
        return {}
    if options.parameters is None:
        raise FQNMismatchError(
            checkpoint.path,
            unexpected=[f"the flat parameter {entry.key}" for entry in units.values()],
            advice="A LOCAL state dict does not say which parameters are in it. Name the model that it was saved from: "
            "model=... (--model FILE.py:FUNCTION).",
        )
    _check_all_ranks(checkpoint, units.values())
    flat_keys = {entry.key for entry in units.values()}
    flat = {
        item.source.entry.key: nest_of(item.path)
        for item in contents.tensors
        if isinstance(item.source, EntrySource) and item.source.entry.key in flat_keys
    }
    plain = [item for item in contents.tensors if not (isinstance(item.source, EntrySource) and item.source.entry.key in flat)]
    outside = frozenset(name_in(item.path) for item in plain if item.section == "model")
    num_ranks = int(checkpoint.metadata.get("ranks", max(len(entry.chunks) for entry in units.values())))
    where = layout(units, options.parameters, outside, num_ranks, checkpoint.path)
    made = {
        stretch.name: OutTensor(
            (*flat[units[unit].key], stretch.name), FlatSource(units[unit], stretch.start, stretch.shape), "model"
        )
        for unit, stretches in where.items()
        if units[unit].key in flat
        for stretch in stretches
    }
    contents.tensors = [made[name] for name in options.parameters.shapes if name in made] + plain
    contents.notes.append(f"{counted(len(units), 'flat parameter')} became {counted(len(made), 'parameter')}")
    return where


def _check_all_ranks(checkpoint: Checkpoint, flat: Iterable[TensorEntry]) -> None:
    for entry in flat:
        found = coverage(entry.chunks, entry.shape)
        if found.missing:
            raise IncompleteCheckpointError(
                checkpoint.path,
                f"{entry.key}: {entry.numel - found.missing} of its {entry.numel} elements are here. The files of other ranks are "
                "missing",
                advice="Name the directory with the files of all ranks together.",
            )


def _refuse_flat(contents: Contents) -> None:
    """Raise :class:`FQNMismatchError` for state named after a flat parameter, since no FSDP2 model has one."""
    left = [item.key for item in contents.tensors if item.section == "optimizer" and FLAT_PARAMETER in item.key.split(".")]
    if left:
        raise FQNMismatchError(
            contents.checkpoint.path,
            problems=[f"{key} is state of a flat parameter" for key in left],
            advice="labkit splits such state only if it is numbered, as optimizer.state_dict() returns it. Leave it out with "
            "drop=[...] (--drop), or save a FULL or SHARDED optimizer state from the old code.",
        )


# -- names, ties, dtypes ----------------------------------------------------------------------------------------------


def _rename(contents: Contents, rules: Sequence[Rule]) -> None:
    if not rules:
        return

    names = [name_in(item.path) for item in contents.tensors if item.section == "model"]
    names += [split[1] for item in contents.tensors if (split := split_state(item.path)) is not None]
    by_pattern = {rule.pattern: rule for rule in rules}
    contents.note_idle("rename", by_pattern, lambda pattern: any(by_pattern[pattern].apply(name) is not None for name in names))

    def change(name: str) -> str:
        return next((new for rule in rules if (new := rule.apply(name)) is not None), name)

    gone = sorted({name for name in names if not change(name)})
    for index, item in enumerate(contents.tensors):
        if item.section == "model":
            contents.tensors[index] = _renamed(item, change(name_in(item.path)))
    map_state_names(contents, change)
    map_group_names(contents, change)
    contents.tensors = [item for item in contents.tensors if not _dropped(item)]
    contents.values = [item for item in contents.values if not _dropped(item)]
    if gone:
        contents.notes.append(
            f"left out with their optimizer state, since a rename rule has an empty right side: {listed(gone, most=8)}"
        )


def _dropped(item: OutTensor | OutValue) -> bool:
    return "" in item.path


def _cast(contents: Contents, dtypes: Mapping[str, torch.dtype]) -> None:
    names = [name_in(item.path) for item in contents.tensors if item.section == "model"]
    for pattern, given in dtypes.items():
        if not isinstance(given, torch.dtype):
            raise CheckpointError(f"dtypes[{pattern!r}]={given!r} is not a torch.dtype. Write torch.bfloat16, for example.")
        if not is_convertible(given):
            raise CheckpointError(f"torch converts no tensor to {given}. Choose another dtype for {pattern!r}, such as bfloat16.")
    contents.note_idle("dtype", dtypes, lambda pattern: bool(fnmatch.filter(names, pattern)))
    for index, item in enumerate(contents.tensors):
        if item.section != "model" or not item.source.dtype.is_floating_point:
            continue
        name = name_in(item.path)
        dtype = next((dtype for pattern, dtype in dtypes.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if dtype is not None and dtype != item.source.dtype:
            cast = CastSource(item.source, dtype, item.key, str(contents.checkpoint.path))
            contents.tensors[index] = replace(item, source=cast)
