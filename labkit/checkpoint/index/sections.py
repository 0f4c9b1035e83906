"""Classification of entries as model, optimizer or other, by the structure of the state.

The rules, in order. Key names do not matter, except for the two that every torch optimizer writes:

1. An optimizer is a dict with both ``param_groups`` and ``state``, at any depth. A ``state`` alone still counts as an optimizer's
if its names are parameter numbers or names of tensors elsewhere in the checkpoint, and its pieces have names that torch's
optimizers use.
2. The other tensors are in nests: the dicts under the top-level keys, and the top level itself. A nest with a floating-point tensor
of at least one dim may be a model, and then all its tensors belong to section ``model``. Random states, permutations and counters
are integers or single numbers, so their nests are ``other``, as are all values that are not tensors. If no nest has such a tensor,
every nest may be a model, except in rank files, which then hold per-rank values.
3. If there are several such nests (averaged weights beside the weights, a teacher), all are ``model``. Where one must be chosen, it
is the one whose names match the given model or the optimizer; if that does not decide, the user must choose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from labkit.checkpoint.errors import CheckpointFormatError
from labkit.checkpoint.index.model import Checkpoint, Path_, TensorEntry, ValueEntry
from labkit.checkpoint.index.names import FLAT_PARAMETER, canonical_fqn, wrappers_in
from labkit.checkpoint.wording import listed, quoted

OPTIMIZER_STATE_NAMES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "step"}
)
Nest = tuple[str | int, ...]


def classify(checkpoint: Checkpoint) -> None:
    """Set the section of each entry, in place, by the rules of this module."""
    entries: list[TensorEntry | ValueEntry] = [*checkpoint.tensors.values(), *checkpoint.values.values()]
    roots = optimizer_roots(entries)
    for entry in entries:
        entry.section = "optimizer" if _in_optimizer(entry, roots) else "other"
    rest = [entry for entry in checkpoint.tensors.values() if entry.section == "other"]
    models = {nest_of(entry.path) for entry in rest if _may_be_a_parameter(entry)}
    if not models and len(checkpoint.ranks) < 2:
        models = {nest_of(entry.path) for entry in rest}
    for entry in rest:
        if nest_of(entry.path) in models:
            entry.section = "model"


def nest_of(path: Path_) -> Nest:
    """Return the top-level key of the dict or list that contains an entry; an empty tuple for the top level itself."""
    return path[:1] if len(path) > 1 else ()


def _may_be_a_parameter(entry: TensorEntry) -> bool:
    return bool(entry.shape) and (entry.dtype.is_floating_point or entry.dtype.is_complex)


def parts(entry: TensorEntry | ValueEntry) -> Path_:
    """Return an entry's nested keys, with names split at dots."""
    return tuple(part for step in entry.path for part in (step.split(".") if isinstance(step, str) else (step,)))


def optimizer_roots(entries: Iterable[TensorEntry | ValueEntry]) -> set[Path_]:
    """Return the prefixes that contain an optimizer's ``state`` and ``param_groups``."""
    groups: set[Path_] = set()
    states: dict[Path_, set[str]] = {}
    others: set[str] = set()
    for entry in entries:
        keys = parts(entry)
        if "param_groups" in keys:
            groups.add(keys[: keys.index("param_groups")])
        elif "state" in keys and keys[-1] in OPTIMIZER_STATE_NAMES:
            at = keys.index("state")
            states.setdefault(keys[:at], set()).add(".".join(map(str, keys[at + 1 : -1])))
        else:
            others.update((canonical_fqn(".".join(map(str, keys))), canonical_fqn(".".join(map(str, keys[1:] or keys)))))
    alone = {
        root
        for root, names in states.items()
        if root not in groups and all(name.isdigit() or canonical_fqn(name) in others for name in names)
    }
    return groups | alone


def _in_optimizer(entry: TensorEntry | ValueEntry, roots: set[Path_]) -> bool:
    keys = parts(entry)
    return any(
        keys[: len(root)] == root and len(keys) > len(root) and keys[len(root)] in ("state", "param_groups") for root in roots
    )


def parameters_of_group(value: object, where: object) -> list[str | int]:
    """Return the ``params`` of an optimizer's group: parameter names or numbers.

    Raises:
        CheckpointFormatError: The value is something else.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | int) for item in value):
        raise CheckpointFormatError(where, "it is not a list of an optimizer's parameters, which have names or numbers")
    return list(value)


def is_moment_piece(entry: TensorEntry) -> bool:
    """Return whether a tensor may be a rank's stretch of a flattened moment: it is 1-D, and its parameter has only a number."""
    keys = [str(part) for part in entry.path]
    return entry.section == "optimizer" and len(entry.shape) == 1 and any(key.isdigit() for key in keys[-2:-1])


def model_nests(checkpoint: Checkpoint) -> list[Nest]:
    """Return the nests that hold models, in stored order."""
    return list(dict.fromkeys(nest_of(entry.path) for entry in checkpoint.section("model")))


def model_nest(checkpoint: Checkpoint, names: Collection[str] = ()) -> Nest:
    """Return the nest that holds the model, by rule 3.

    Args:
        checkpoint: A classified checkpoint.
        names: The model's canonical names, if they are known.

    Raises:
        CheckpointFormatError: Several nests may be the model.
    """
    nests = flat_nests(checkpoint) or model_nests(checkpoint)
    for known in (set(names), _optimizer_names(checkpoint)):
        if len(nests) > 1 and known:
            held: dict[Nest, set[str]] = {}
            for entry in checkpoint.section("model"):
                held.setdefault(nest_of(entry.path), set()).add(canonical_fqn(name_in(entry.path)))
            nests = [nest for nest in nests if known & held[nest]] or nests
    if len(nests) > 1:
        called = [nest_text(nest) for nest in nests]
        raise CheckpointFormatError(
            checkpoint.path,
            f"{len(nests)} parts of it may be the model: {listed(called, most=8)}. Say which with only={called[0]!r} "
            f"(--only {quoted(called[0])}), or name the model.",
        )
    return nests[0] if nests else ()


def flat_nests(checkpoint: Checkpoint) -> list[Nest]:
    """Return the nests that hold flat parameters of FSDP1."""
    flat = (entry for entry in checkpoint.section("model") if FLAT_PARAMETER in entry.key.split("."))
    return list(dict.fromkeys(nest_of(entry.path) for entry in flat))


def _optimizer_names(checkpoint: Checkpoint) -> set[str]:
    """Return the parameter names in optimizer state; numbers do not count."""
    names = set()
    for entry in checkpoint.section("optimizer"):
        keys = [str(part) for part in parts(entry)]
        if "state" in keys:
            name = ".".join(keys[keys.index("state") + 1 : -1])
            names.add("" if name.isdigit() else canonical_fqn(name))
    return names - {""}


def name_in(path: Path_) -> str:
    """Return an entry's name inside its nest."""
    return ".".join(map(str, path[len(nest_of(path)) :]))


def nest_text(nest: Nest) -> str:
    """Return a nest as text, for display and for the option that chooses it; ``.`` is the top level."""
    return ".".join(map(str, nest)) or "."


def wrappers_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Count how many tensor names contain each wrapper's part, with each nest counted as in :func:`wrappers_in`."""
    result: dict[str, int] = {}
    nests: dict[Nest | str, list[str]] = {}
    for entry in checkpoint.tensors.values():
        key = nest_of(entry.path) if entry.section == "model" else entry.section
        nests.setdefault(key, []).append(name_in(entry.path) if entry.section == "model" else entry.key)
    for names in nests.values():
        for wrapper, count in wrappers_in(names).items():
            result[wrapper] = result.get(wrapper, 0) + count
    return result
