"""Canonical fully qualified names.

Wrappers leave their attribute in every name below them: FSDP1 ``_fsdp_wrapped_module`` (and ``_fpw_module`` before
torch 2.0), activation checkpointing ``_checkpoint_wrapped_module``, ``torch.compile`` ``_orig_mod``, DDP and
DataParallel ``module``. The same parameter so has many names, in any nesting order, and some of torch's functions
clean some of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from labkit.checkpoint.errors import FQNMismatchError
from labkit.checkpoint.model import Path_

WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_orig_mod")
FLAT_PARAMETER = "_flat_param"


def canonical_fqn(name: str) -> str:
    """A name without the parts that wrappers added.

    ``module`` is dropped where it can only be DDP's: at the front of the name, and beside another wrapper's part.
    Elsewhere it may be a submodule's own name; :func:`match_names` decides that with the model's names at hand.

    >>> canonical_fqn("module._fsdp_wrapped_module.0._checkpoint_wrapped_module._orig_mod.weight")
    '0.weight'
    """
    parts = name.split(".")
    last = len(parts) - 1
    kept = []
    for index, part in enumerate(parts):
        before = parts[index - 1] if index else None
        after = parts[index + 1] if index < last else None
        if part in WRAPPERS and index < last:
            continue
        # The last part names a parameter, so it stays even when it is called "module".
        if part == "module" and index < last and (before is None or before in WRAPPERS or after in WRAPPERS):
            continue
        kept.append(part)
    cleaned = ".".join(kept)
    return canonical_fqn(cleaned) if cleaned.startswith("module.") and cleaned != name else cleaned


def wrappers_in(names: Iterable[str]) -> dict[str, int]:
    """How many names carry each wrapper's part: ``{"_orig_mod": 12, "module": 12}``."""
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        found.update({part for part in parts if part in WRAPPERS or part == FLAT_PARAMETER})
        if parts[0] == "module" and len(parts) > 1:
            found["module"] += 1
    return dict(found)


def canonical_names(names: Sequence[str], path: object) -> dict[str, str]:
    """Each name's canonical name.

    Raises:
        FQNMismatchError: Two names become the same one.
    """
    result = {name: canonical_fqn(name) for name in names}
    check_unique(result, path)
    return result


def check_unique(renamed: Mapping[str, str], path: object) -> None:
    """Raise :class:`FQNMismatchError` when two names were given the same new name."""
    sources: dict[str, list[str]] = {}
    for old, new in renamed.items():
        sources.setdefault(new, []).append(old)
    clashes = [f"{' and '.join(olds)} both become {new}" for new, olds in sources.items() if len(olds) > 1]
    if clashes:
        raise FQNMismatchError(path, unexpected=clashes, advice="Give one of them another name in the rename table.")


def match_names(names: Iterable[str], reference: Iterable[str]) -> dict[str, str]:
    """Find each name's partner among a model's names, wrappers on either side set aside.

    Args:
        names: Names from a checkpoint.
        reference: The model's own names; they may carry wrappers too.

    Returns:
        Name to reference name, for those that have one. Also ``module`` parts inside a name are set aside when the
        names agree only then.
    """
    by_canonical: dict[str, str] = {}
    by_bare: dict[str, str | None] = {}
    for name in reference:
        by_canonical.setdefault(canonical_fqn(name), name)
        bare = _bare(name)
        by_bare[bare] = None if bare in by_bare else name
    found: dict[str, str] = {}
    for name in names:
        partner = by_canonical.get(canonical_fqn(name)) or by_bare.get(_bare(name))
        if partner is not None:
            found[name] = partner
    return found


def _bare(name: str) -> str:
    parts = canonical_fqn(name).split(".")
    return ".".join(part for part in parts[:-1] if part != "module") + "." + parts[-1]


def flat_key(path: Path_) -> str:
    """Nested keys as DCP flattens them."""
    return ".".join(map(str, path))
