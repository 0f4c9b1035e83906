"""Compare the model's tensors on their way into another checkpoint with the model that the user named."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from labkit.checkpoint.contents import Contents
from labkit.checkpoint.entry_names import split_model
from labkit.checkpoint.errors import CheckpointMismatchError, FQNMismatchError
from labkit.checkpoint.flat import ParameterList
from labkit.checkpoint.names import match_names
from labkit.checkpoint.sections import model_prefix


def misfit(contents: Contents, parameters: ParameterList, drop: Sequence[str]) -> CheckpointMismatchError | None:
    """The error that says what does not fit: names that one side lacks, or shapes; None when all is well.

    A model's name that matches a ``drop`` pattern may be missing, and so may all names of a tied parameter but one. Contents
    without model tensors fit every model.
    """
    prefix = model_prefix(contents.checkpoint)
    have: dict[str, tuple[int, ...]] = {}
    for item in contents.tensors:
        if item.section == "model":
            nesting, name = split_model(contents, item.path)
            if nesting or not prefix:  # beside the model may be another one, such as averaged weights
                have[name] = item.source.shape
    if not have:
        return None
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
    unexpected = [name for name in have if name not in partners]
    path = contents.checkpoint.path
    if missing or unexpected:
        return FQNMismatchError(
            path,
            missing=missing,
            unexpected=unexpected,
            advice="Name the model that the checkpoint was saved from, or the one that a rename table (--rename) leads to. What "
            "the model has no more use for is left out with drop=[...] (--drop).",
        )
    wrong = [(name, shape, parameters.tensors[partners[name]]) for name, shape in have.items()]
    problems = [f"{name} has shape {shape}, and in the model {expected}" for name, shape, expected in wrong if shape != expected]
    if problems:
        return CheckpointMismatchError(path, problems, advice="Name the model that the checkpoint was saved from.")
    return None
