"""Comparison of a migration's model tensors with the model that the user gave."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from functools import partial

from labkit.checkpoint.contents.contents import Contents
from labkit.checkpoint.contents.flat import ParameterList
from labkit.checkpoint.errors import CheckpointMismatchError, FQNMismatchError
from labkit.checkpoint.index.names import match_names
from labkit.checkpoint.index.prefixes import PrefixChange, prefix_change
from labkit.checkpoint.index.sections import Nest, name_in, nest_of
from labkit.checkpoint.wording import quoted


def misfit(contents: Contents, parameters: ParameterList, drop: Sequence[str]) -> CheckpointMismatchError | None:
    """Return an error if names or shapes do not match the model; else None.

    If several nests may be the model, the one that shares the most names with it is compared; the model's names may also include
    the nest as a prefix. Names that match a ``drop`` pattern may be missing, and so may all but one name of a tied parameter.
    Contents without model tensors match every model.
    """
    tensors = [item for item in contents.tensors if item.section == "model"]
    if not tensors:
        return None
    nests: dict[str, dict[str, tuple[int, ...]]] = {"": {item.key: item.source.shape for item in tensors}}
    for item in tensors:
        if nest := nest_of(item.path):
            nests.setdefault(f"{nest[0]}.", {})[name_in(item.path)] = item.source.shape
    matched = {prefix: match_names(names, parameters.tensors) for prefix, names in nests.items()}
    prefix = max(matched, key=lambda prefix: (len(matched[prefix]), len(prefix)))
    have, partners = nests[prefix], matched[prefix]
    missing, unexpected = _differences(parameters, drop, prefix, have)
    path = contents.checkpoint.path
    if missing or unexpected:
        return FQNMismatchError(
            path,
            missing=missing,
            unexpected=unexpected,
            advice=_one_change(contents, parameters, drop)
            or "Name the model that the checkpoint was saved from, or the one that a rename table (--rename) leads to. Leave out "
            "what the model no longer uses with drop=[...] (--drop).",
        )
    wrong = [(name, shape, parameters.tensors[partners[name]]) for name, shape in have.items()]
    problems = [f"{name} has shape {shape}, but {expected} in the model" for name, shape, expected in wrong if shape != expected]
    if problems:
        return CheckpointMismatchError(path, problems, advice="Name the model that the checkpoint was saved from.")
    return None


def _differences(parameters: ParameterList, drop: Sequence[str], prefix: str, have: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the names that the checkpoint lacks, and those that the model lacks."""
    partners = match_names(have, parameters.tensors)
    found = set(partners.values())
    found |= {parameters.tied[name] for name in found if name in parameters.tied}
    missing = [
        name
        for name in parameters.tensors
        if name not in found
        and parameters.tied.get(name) not in found
        and not any(fnmatch.fnmatchcase(key, pattern) for key in (name, prefix + name) for pattern in drop)
    ]
    return missing, [name for name in have if name not in partners]


def _one_change(contents: Contents, parameters: ParameterList, drop: Sequence[str]) -> str:
    """Return advice if changing one prefix maps a nest's names to the model's; else an empty string."""
    nests: dict[Nest, list[str]] = {}
    for item in contents.tensors:
        if item.section == "model":
            nests.setdefault(nest_of(item.path), []).append(name_in(item.path))
    for nest, names in nests.items():
        differences = partial(_differences, parameters, drop, f"{nest[0]}." if nest else "")
        change = prefix_change(names, parameters.tensors, lambda renamed: differences(renamed) == ([], []))  # noqa: B023 (called at once)
        if change is not None:
            return _part_advice(contents, nest, change) or change.advice
    return ""


def _part_advice(contents: Contents, nest: Nest, change: PrefixChange) -> str:
    """Return advice if the name given to a part adds a level around the part's own dict; else an empty string."""
    for part in contents.checkpoint.parts if nest and not change.new else ():
        if {f"{entry.path[0]}." for entry in part.section("model")} == {change.old}:
            relative = part.path.relative_to(contents.checkpoint.path)
            own = change.old.removesuffix(".")
            return f"The part {relative} holds a dict {own!r} of its own. Read it as it is: --part {quoted(f'={relative}')}"
    return ""
