"""What migration changes: wrappers leave the names, flat parameters are taken apart, numbers become names, rules apply."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch

from labkit.checkpoint.contents import Contents, OutTensor, OutValue, read_values
from labkit.checkpoint.errors import CheckpointError, CheckpointMismatchError, FQNMismatchError
from labkit.checkpoint.flat import ParameterList, Stretch, layout, units_of
from labkit.checkpoint.model import Chunk, ChunkTable, Path_, TensorEntry
from labkit.checkpoint.names import canonical_fqn, counted
from labkit.checkpoint.sections import model_prefix
from labkit.checkpoint.sources import CastSource, EntrySource, FlatSource

DROP_ADVICE = "Leave it out with drop=[...] (--drop), or save it as plain data."


@dataclass(frozen=True)
class Rule:
    """A line of a rename table: a pattern with ``*`` and what becomes of a name that it matches as a whole.

    Each ``*`` in the replacement stands for what the ``*`` in its place matched. An empty replacement drops the entry.
    """

    pattern: str
    replacement: str

    def apply(self, name: str) -> str | None:
        """The new name, or None when the pattern does not match."""
        expression = "(.*)".join(re.escape(part) for part in self.pattern.split("*"))
        match = re.fullmatch(expression, name)
        if match is None:
            return None
        parts = iter(match.groups())
        return re.sub(r"\*", lambda _: next(parts, ""), self.replacement)


def read_rules(path: Path) -> list[Rule]:
    """Read a rename table: one ``old -> new`` a line, ``#`` begins a comment, the first match wins.

    Raises:
        CheckpointError: The file or a line cannot be read, or its replacement has more ``*`` than its pattern.
    """
    rules = []
    try:
        text_lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: the rename table cannot be read ({error})") from None
    for number, line in enumerate(text_lines, start=1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        pattern, arrow, replacement = (part.strip() for part in text.partition("->"))
        if not arrow or not pattern or replacement.count("*") > pattern.count("*"):
            raise CheckpointError(f"{path}, line {number}: {text!r} is no rule. Write 'old.*.weight -> new.*.weight'.")
        rules.append(Rule(pattern, replacement))
    return rules


@dataclass(frozen=True)
class Options:
    """What to change on the way.

    Attributes:
        parameters: The model's parameters, for flat parameters and for state numbered by position.
        order: Parameter names in the order that the optimizer was given them; by default the trainable ones in the
            model's order.
        rules: Rename rules for canonical parameter names, applied to the model and to its optimizer state alike.
        drop: Patterns of keys to leave out.
        dtypes: Pattern of model names to dtype; the first match wins.
    """

    parameters: ParameterList | None = None
    order: Sequence[str] | None = None
    rules: Sequence[Rule] = ()
    drop: Sequence[str] = ()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


def transform(contents: Contents, options: Options) -> Contents:
    """Bring contents into the form that FSDP2 and ``torch.distributed.checkpoint.state_dict`` load.

    Raises:
        FQNMismatchError: Names collide or do not fit the model, or numbered state comes without names.
        CheckpointMismatchError: Shapes do not fit the model.

    Ranks: local. Reads values, no tensor data.
    """
    contents = replace(contents, tensors=list(contents.tensors), values=list(contents.values), notes=list(contents.notes))
    _drop(contents, options.drop)
    _canonical(contents)
    where = _take_flat_apart(contents, options)
    _name_numbers(contents, options, where)
    _rename(contents, options.rules)
    _add_tied(contents, options.parameters)
    _cast(contents, options.dtypes)
    contents.check_unique()
    return contents


def _note_idle(contents: Contents, kind: str, patterns: Iterable[str], matches: Callable[[str], bool]) -> None:
    """A pattern that matches nothing is mostly a slip of the pen."""
    contents.notes.extend(f"the {kind} pattern {pattern!r} matches nothing" for pattern in patterns if not matches(pattern))


def _drop(contents: Contents, patterns: Sequence[str]) -> None:
    keys = [*(item.key for item in contents.tensors), *(item.key for item in contents.values)]
    _note_idle(contents, "drop", patterns, lambda pattern: bool(fnmatch.filter(keys, pattern)))

    def kept(key: str) -> bool:
        return not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)

    contents.tensors = [item for item in contents.tensors if kept(item.key)]
    contents.values = [item for item in contents.values if kept(item.key)]


def split_model(contents: Contents, path: Path_) -> tuple[Path_, str]:
    """The nesting before a model tensor's name, and the name."""
    prefix = model_prefix(contents.checkpoint)
    if prefix and str(path[0]) + "." == prefix:
        return path[:1], ".".join(map(str, path[1:]))
    return (), ".".join(map(str, path))


def split_state(path: Path_) -> tuple[Path_, str, str] | None:
    """An optimizer tensor's nesting up to ``state``, the parameter's name, and the piece; None elsewhere."""
    keys = [str(part) for part in path]
    if "state" not in keys or len(keys) - keys.index("state") < 3:
        return _split_flat_state(path)
    at = keys.index("state") + 1
    return path[:at], ".".join(keys[at:-1]), keys[-1]


def _split_flat_state(path: Path_) -> tuple[Path_, str, str] | None:
    # A flattened optimizer dict (torch's flatten_optimizer_state_dict) has "state.<fqn>.<piece>" in one key.
    head, last = path[:-1], str(path[-1])
    if last.startswith("state.") and last.count(".") >= 2:
        name, _, piece = last.removeprefix("state.").rpartition(".")
        return (*head, "state"), name, piece
    return None


def _canonical(contents: Contents) -> None:
    for index, item in enumerate(contents.tensors):
        if item.section == "model":
            nesting, name = split_model(contents, item.path)
            contents.tensors[index] = replace(item, path=(*nesting, canonical_fqn(name)))
    _map_state_names(contents, canonical_fqn)
    _map_group_names(contents, canonical_fqn)


def _map_state_names(contents: Contents, change: Callable[[str], str]) -> None:
    def moved(path: Path_) -> Path_:
        split = split_state(path)
        return path if split is None else (*split[0], change(split[1]), split[2])

    contents.tensors = [replace(t, path=moved(t.path)) if t.section == "optimizer" else t for t in contents.tensors]
    contents.values = [replace(v, path=moved(v.path)) if v.section == "optimizer" else v for v in contents.values]


def _is_group_parameters(item: OutValue) -> bool:
    return item.section == "optimizer" and item.path[-1] == "params" and "param_groups" in item.path


def _map_group_names(contents: Contents, change: Callable[[str], str]) -> None:
    wanted = [item for item in contents.values if _is_group_parameters(item)]
    values = read_values(contents, wanted, drop_advice=DROP_ADVICE)
    for index, item in enumerate(contents.values):
        if _is_group_parameters(item) and any(isinstance(name, str) for name in values[item.key]):
            names = [change(name) for name in values[item.key]]
            contents.values[index] = OutValue(item.path, item.section, [name for name in names if name])


# -- FSDP1 LOCAL ------------------------------------------------------------------------------------------------------


def _take_flat_apart(contents: Contents, options: Options) -> dict[str, list[Stretch]]:
    """Replace flat parameters by what is in them; returns where each parameter lies, per unit."""
    checkpoint = contents.checkpoint
    units = units_of(checkpoint, model_prefix(checkpoint))
    if not units:
        return {}
    if options.parameters is None:
        raise FQNMismatchError(
            checkpoint.path,
            unexpected=[f"the flat parameter {entry.key}" for entry in units.values()],
            advice="A LOCAL state dict does not say which parameters are in it. Name the model that it was saved from: "
            "model=... (--model FILE.py:FUNCTION).",
        )
    flat_keys = {entry.key for entry in units.values()}
    plain = [item for item in contents.tensors if not (isinstance(item.source, EntrySource) and item.source.entry.key in flat_keys)]
    outside = frozenset(split_model(contents, item.path)[1] for item in plain if item.section == "model")
    num_ranks = int(checkpoint.metadata.get("ranks", 1))
    where = layout(units, options.parameters, outside, num_ranks, checkpoint.path)
    nesting = next(split_model(contents, item.path)[0] for item in contents.tensors if item not in plain)
    made = {
        stretch.name: OutTensor((*nesting, stretch.name), FlatSource(units[unit], stretch.start, stretch.shape), "model")
        for unit, stretches in where.items()
        for stretch in stretches
    }
    contents.tensors = [made[name] for name in options.parameters.shapes if name in made] + plain
    contents.notes.append(f"{counted(len(units), 'flat parameter')} became {counted(len(made), 'parameter')}")
    return where


# -- state numbered by position ---------------------------------------------------------------------------------------


def _name_numbers(contents: Contents, options: Options, where: Mapping[str, list[Stretch]]) -> None:
    groups = [item for item in contents.values if _is_group_parameters(item)]
    ids = read_values(contents, groups, drop_advice=DROP_ADVICE)
    numbered = [item for item in groups if ids[item.key] and all(isinstance(number, int) for number in ids[item.key])]
    if not numbered:
        return
    numbers = sorted(number for item in numbered for number in ids[item.key])
    if where and len(numbers) == len(where) and options.order is None:
        # use_orig_params=False: the optimizer saw the flat parameters, in the order of the units.
        members = {number: [stretch.name for stretch in where[unit]] for number, unit in zip(numbers, where, strict=True)}
        _split_flat_moments(contents, dict(zip(numbers, where.values(), strict=True)))
    else:
        names = _names_by_number(contents, [ids[item.key] for item in numbered], options)
        members = {number: [name] for number, name in names.items()}
        _map_state_names(contents, lambda name: names.get(int(name), name) if name.isdigit() else name)
    for index, item in enumerate(contents.values):
        if item in numbered:
            listed = [name for number in ids[item.key] for name in members[number]]
            contents.values[index] = OutValue(item.path, item.section, listed)
    if options.parameters is not None:
        _join_pieces(contents, options.parameters)
        _check_moments(contents, options.parameters)


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


def _names_by_number(contents: Contents, groups: Sequence[Sequence[int]], options: Options) -> dict[int, str]:
    path = contents.checkpoint.path
    numbers = [number for group in groups for number in group]
    order = options.order
    if order is None and options.parameters is not None:
        if sum(bool(group) for group in groups) > 1:
            raise FQNMismatchError(
                path,
                unexpected=[f"optimizer state numbered over {len(groups)} parameter groups"],
                advice="The model's order does not say how its parameters were divided into groups. List the names in the "
                "optimizer's order: order=[...] (--order FILE, one a line).",
            )
        every = list(options.parameters.shapes)
        trainable = [name for name in every if name in options.parameters.trainable]
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


# -- names, ties, dtypes ----------------------------------------------------------------------------------------------


def _rename(contents: Contents, rules: Sequence[Rule]) -> None:
    if not rules:
        return

    names = [split_model(contents, item.path)[1] for item in contents.tensors if item.section == "model"]
    names += [split[1] for item in contents.tensors if (split := split_state(item.path)) is not None]
    by_pattern = {rule.pattern: rule for rule in rules}
    _note_idle(contents, "rename", by_pattern, lambda pattern: any(by_pattern[pattern].apply(name) is not None for name in names))

    def change(name: str) -> str:
        return next((new for rule in rules if (new := rule.apply(name)) is not None), name)

    for index, item in enumerate(contents.tensors):
        if item.section == "model":
            nesting, name = split_model(contents, item.path)
            contents.tensors[index] = replace(item, path=(*nesting, change(name)))
    _map_state_names(contents, change)
    _map_group_names(contents, change)
    contents.tensors = [item for item in contents.tensors if not _dropped(item)]
    contents.values = [item for item in contents.values if not _dropped(item)]


def _dropped(item: OutTensor | OutValue) -> bool:
    return "" in item.path


def _add_tied(contents: Contents, parameters: ParameterList | None) -> None:
    """A tied parameter has every one of its names in ``model.state_dict()``; FSDP1 saved some forms with the first only."""
    if parameters is None:
        return
    by_name = {split_model(contents, item.path): item for item in contents.tensors if item.section == "model"}
    for (nesting, name), item in list(by_name.items()):
        for alias, owner in parameters.tied.items():
            if owner == name and (nesting, alias) not in by_name:
                contents.tensors.append(replace(item, path=(*nesting, alias)))
                contents.notes.append(f"{alias} is tied to {name}")


def _cast(contents: Contents, dtypes: Mapping[str, torch.dtype]) -> None:
    names = [split_model(contents, item.path)[1] for item in contents.tensors if item.section == "model"]
    for pattern, given in dtypes.items():
        if not isinstance(given, torch.dtype):
            raise CheckpointError(f"dtypes[{pattern!r}]={given!r} is no torch.dtype. Write torch.bfloat16, for example.")
    _note_idle(contents, "dtype", dtypes, lambda pattern: bool(fnmatch.filter(names, pattern)))
    for index, item in enumerate(contents.tensors):
        if item.section != "model" or not item.source.dtype.is_floating_point:
            continue
        name = split_model(contents, item.path)[1]
        dtype = next((dtype for pattern, dtype in dtypes.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if dtype is not None and dtype != item.source.dtype:
            cast = CastSource(item.source, dtype, item.key, str(contents.checkpoint.path))
            contents.tensors[index] = replace(item, source=cast)
