"""Tell the model's entries from the optimizer's and from everything else, by the names alone."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.checkpoint.errors import CheckpointFormatError
from labkit.checkpoint.model import Checkpoint, Path_, Section, TensorEntry, ValueEntry
from labkit.checkpoint.names import wrappers_in

OPTIMIZER_STATE_NAMES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "step"}
)
_MODEL_ROOTS = ("model", "state_dict", "model_state_dict", "module", "net", "network", "params", "weights")
_OTHER_ROOTS = ("rng", "scheduler", "lr_scheduler", "sched", "random", "epoch", "dataloader", "sampler", "scaler")


def classify(checkpoint: Checkpoint) -> None:
    """Set the section of each entry, in place.

    An optimizer is recognised by its ``param_groups`` beside ``state``, wherever it is nested; a checkpoint that holds
    one optimizer's dict only has it at the root.
    """
    entries: list[TensorEntry | ValueEntry] = [*checkpoint.tensors.values(), *checkpoint.values.values()]
    roots = optimizer_roots(entries)
    for entry in entries:
        entry.section = _section(entry, roots)
    # Beside a dict of weights, a lone tensor at the top is a value of the training loop and no parameter.
    nested = [entry for entry in checkpoint.section("model") if len(entry.path) > 1]
    lone = [entry for entry in checkpoint.section("model") if len(entry.path) == 1]
    if len(nested) >= len(lone):
        for entry in lone:
            entry.section = "other"


def parts(entry: TensorEntry | ValueEntry) -> Path_:
    """The entry's nested keys, names with dots split into their parts."""
    return tuple(part for step in entry.path for part in (step.split(".") if isinstance(step, str) else (step,)))


def optimizer_roots(entries: Iterable[TensorEntry | ValueEntry]) -> set[Path_]:
    """The prefixes under which an optimizer's ``state`` and ``param_groups`` lie."""
    groups: set[Path_] = set()
    states: set[Path_] = set()
    for entry in entries:
        keys = parts(entry)
        if "param_groups" in keys:
            groups.add(keys[: keys.index("param_groups")])
        elif "state" in keys and keys[-1] in OPTIMIZER_STATE_NAMES:
            states.add(keys[: keys.index("state")])
    return groups | states


def _section(entry: TensorEntry | ValueEntry, roots: set[Path_]) -> Section:
    keys = parts(entry)
    for root in roots:
        if keys[: len(root)] == root and len(keys) > len(root) and keys[len(root)] in ("state", "param_groups"):
            return "optimizer"
    if isinstance(entry, ValueEntry) or str(keys[0]).lower().startswith(_OTHER_ROOTS):
        return "other"
    return "model"


def parameters_of_group(value: object, where: object) -> list[str | int]:
    """Return what an optimizer's group has under ``params``: the parameters' names, or their numbers.

    Raises:
        CheckpointFormatError: It is something else.
    """
    if not isinstance(value, list | tuple) or not all(isinstance(item, str | int) for item in value):
        raise CheckpointFormatError(where, "it is no list of an optimizer's parameters, which have names or numbers")
    return list(value)


def is_moment_piece(entry: TensorEntry) -> bool:
    """Whether each rank's file may hold another stretch of a flattened moment: 1-D, of a parameter that has only a number."""
    keys = [str(part) for part in entry.path]
    return entry.section == "optimizer" and len(entry.shape) == 1 and any(key.isdigit() for key in keys[-2:-1])


def model_prefix(checkpoint: Checkpoint) -> str:
    """What stands before every parameter name: ``"model."`` in ``{"model": ..., "optim": ...}``, else nothing.

    Only a nesting that the checkpoint itself recorded counts: a module called ``model`` is part of its parameters' names.
    """
    heads = dict.fromkeys(str(entry.path[0]) for entry in checkpoint.section("model"))
    if not all(len(entry.path) > 1 for entry in checkpoint.section("model")):
        return ""
    if len(heads) > 1:  # averaged weights, a teacher: take the one that is called what everybody calls it
        heads = {head: None for head in heads if head in _MODEL_ROOTS}
    return f"{next(iter(heads))}." if len(heads) == 1 else ""


def wrappers_of(checkpoint: Checkpoint) -> dict[str, int]:
    """How many tensors' names carry each wrapper's part, as :func:`wrappers_in` counts them."""
    prefix = model_prefix(checkpoint)
    return wrappers_in(entry.key.removeprefix(prefix if entry.section == "model" else "") for entry in checkpoint.tensors.values())
