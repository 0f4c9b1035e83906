"""Canonical fully qualified names.

A wrapper adds its attribute's name to every parameter name below it. FSDP1's ``_fsdp_wrapped_module`` (``_fpw_module`` before torch
2.0), activation checkpointing's ``_checkpoint_wrapped_module`` and ``torch.compile``'s ``_orig_mod`` are private names that no
model uses for a submodule, so they are always removed. But the ``module`` of DDP and DataParallel may also be a submodule's own
name. The rules for it:

1. If there is a model, its names (:func:`match_names`) and the types of its modules (:func:`fqn_of`) decide.
2. Without one, a leading ``module.`` is removed only if every name begins with it and the caller asks for it
(:func:`canonical_names`).
3. ``module`` inside a name stays.
4. Without a model, a name that occurs both with and without a ``module`` part (:func:`twins`) may be one parameter or two, so the
user is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from labkit.checkpoint.errors import FQNMismatchError
from labkit.checkpoint.index.model import Path_

WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_orig_mod")
FLAT_PARAMETER = "_flat_param"
_DDP = "module."


def canonical_fqn(name: str) -> str:
    """Return a name without the parts that wrappers with private names add.

    >>> canonical_fqn("_fsdp_wrapped_module.0._checkpoint_wrapped_module._orig_mod.weight")
    '0.weight'
    """
    *owners, last = name.split(".")
    return ".".join([*(part for part in owners if part not in WRAPPERS), last])


def fqn_of(module: nn.Module) -> Callable[[str], str]:
    """Return a function that maps a module's names to canonical ones, without wrappers and without the ``module`` of DDP.

    The types of the wrapped modules show which ``module`` belongs to DDP or DataParallel.
    """
    wrapped = [path for path, part in module.named_modules() if isinstance(part, DistributedDataParallel | DataParallel)]
    owners = [".".join(part for part in path.split(".") if part and part not in WRAPPERS) for path in wrapped]
    prefixes = sorted((f"{owner}.module.".lstrip(".") for owner in owners), key=len, reverse=True)

    def canonical(name: str) -> str:
        name = canonical_fqn(name)
        for prefix in prefixes:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return name

    return canonical


def wrappers_in(names: Iterable[str]) -> dict[str, int]:
    """Count the names that contain each wrapper's part: ``{"_orig_mod": 12, "module": 12}``.

    ``module`` is counted only if every name begins with it, because only then is it taken for DDP's.
    """
    names = list(names)
    found: Counter[str] = Counter()
    for name in names:
        found.update({part for part in name.split(".") if part in WRAPPERS or part == FLAT_PARAMETER})
    if _all_in_module([canonical_fqn(name) for name in names]):
        found["module"] = len(names)
    return dict(found)


def canonical_names(names: Iterable[str], path: object) -> dict[str, str]:
    """Map one model's names to canonical names, by this module's rules for when there is no model.

    Raises:
        FQNMismatchError: Two names become the same one.
    """
    result = names_without_wrappers(names)
    check_unique(result, path)
    return result


def names_without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Map one model's names as :func:`canonical_names` does, but allow two to become the same."""
    result = {name: canonical_fqn(name) for name in names}
    while _all_in_module(result.values()):
        result = {name: canonical.removeprefix(_DDP) for name, canonical in result.items()}
    return result


def _all_in_module(names: Iterable[str]) -> bool:
    names = list(names)
    return bool(names) and all(name.startswith(_DDP) for name in names)


def check_unique(renamed: Mapping[str, str], path: object) -> None:
    """Raise :class:`FQNMismatchError` if two names get the same new name."""
    sources: dict[str, list[str]] = {}
    for old, new in renamed.items():
        sources.setdefault(new, []).append(old)
    clashes = [f"{' and '.join(olds)} both become {new}" for new, olds in sources.items() if len(olds) > 1]
    if clashes:
        raise FQNMismatchError(path, unexpected=clashes, advice="Give one of them another name in the rename table.")


def match_names(names: Iterable[str], reference: Iterable[str]) -> dict[str, str]:
    """Find each name's partner among a model's names, ignoring wrappers on either side.

    Args:
        names: Names from a checkpoint.
        reference: The model's own names; they may contain wrappers too.

    Returns:
        Each name's reference name, for names that have a partner. First, names that are equal without private wrapper names are
        partners. Of the rest, names that are equal without any ``module`` parts are, if each side has only one such name.
    """
    names = list(names)
    exact = {canonical_fqn(name): name for name in reference}
    found = {name: partner for name in names if (partner := exact.get(canonical_fqn(name))) is not None}
    taken = set(found.values())
    ours = _by_bare_name(name for name in names if name not in found)
    theirs = _by_bare_name(name for name in exact.values() if name not in taken)
    return found | {ours[bare]: theirs[bare] for bare in ours if bare in theirs}


def twins(shapes: Mapping[str, object]) -> list[list[str]]:
    """Return groups of one model's names that differ only in ``module`` parts and have equal shapes.

    >>> twins({"weight": (2, 2), "module.weight": (2, 2), "bias": (2,)})
    [['weight', 'module.weight']]
    """
    found = []
    for same in _bare_names(shapes).values():
        alike = [name for name in same if shapes[name] == shapes[min(same, key=len)]]
        if len(alike) > 1:
            found.append(sorted(alike, key=len))
    return found


def _by_bare_name(names: Iterable[str]) -> dict[str, str]:
    """Map each name without its ``module`` parts to the full name, if only one name matches."""
    return {bare: same[0] for bare, same in _bare_names(names).items() if len(same) == 1}


def _bare_names(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        *owners, last = canonical_fqn(name).split(".")
        groups.setdefault(".".join([*(part for part in owners if part != "module"), last]), []).append(name)
    return groups


def flat_key(path: Path_) -> str:
    """Join nested keys as DCP does."""
    return ".".join(map(str, path))
