"""Parameter names within the paths of entries, in a model and in its optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from labkit.checkpoint.contents.contents import Contents, OutTensor, OutValue, read_values
from labkit.checkpoint.index.model import Path_
from labkit.checkpoint.index.sections import parameters_of_group

DROP_ADVICE = "Leave it out with drop=[...] (--drop), or save it as plain data."


def split_state(path: Path_) -> tuple[Path_, str, str] | None:
    """Split an optimizer tensor's path into the keys up to ``state``, the parameter's name, and the piece; None for other paths."""
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


def split_in(root: Path_, item: OutTensor | OutValue) -> tuple[Path_, str, str] | None:
    """Split the path of an entry as :func:`split_state` does, but only for one optimizer; None for other entries."""
    split = split_state(item.path) if item.section == "optimizer" else None
    return split if split is not None and split[0][:-1] == root else None


def map_state_names(contents: Contents, change: Callable[[str], str], root: Path_ | None = None) -> None:
    """Change the parameter's name in every entry of optimizer state, or of one optimizer's state."""

    def moved(path: Path_) -> Path_:
        split = split_state(path)
        if split is None or (root is not None and split[0][:-1] != root):
            return path
        return path if change(split[1]) == split[1] else (*split[0], change(split[1]), split[2])

    contents.tensors = [replace(t, path=moved(t.path)) if t.section == "optimizer" else t for t in contents.tensors]
    contents.values = [replace(v, path=moved(v.path)) if v.section == "optimizer" else v for v in contents.values]


def is_group_parameters(item: OutValue) -> bool:
    """Return whether a value is the list of parameters of an optimizer's group."""
    return item.section == "optimizer" and item.path[-1] == "params" and "param_groups" in item.path


def group_names(contents: Contents) -> list[str]:
    """Return the names in the lists of parameters of optimizer groups; numbers are left out."""
    wanted = [item for item in contents.values if is_group_parameters(item)]
    values = read_values(contents, wanted, drop_advice=DROP_ADVICE)
    listed = [parameters_of_group(value, f"{contents.checkpoint.path}: {key}") for key, value in values.items()]
    return [name for names in listed for name in names if isinstance(name, str)]


def map_group_names(contents: Contents, change: Callable[[str], str]) -> None:
    """Change the names in the lists of parameters of optimizer groups; a name that becomes empty leaves the list."""
    wanted = [item for item in contents.values if is_group_parameters(item)]
    values = read_values(contents, wanted, drop_advice=DROP_ADVICE)
    for index, item in enumerate(contents.values):
        if is_group_parameters(item):
            parameters = parameters_of_group(values[item.key], f"{contents.checkpoint.path}: {item.key}")
            if any(isinstance(name, str) for name in parameters):
                names = [change(name) if isinstance(name, str) else name for name in parameters]
                contents.values[index] = OutValue(item.path, item.section, [name for name in names if name != ""])
