"""Search for the models beside an optimizer: in the dict that holds it, and in each dict around that one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from labkit.checkpoint.data.rank_shares import is_flat
from labkit.checkpoint.index.model import Checkpoint, Path_
from labkit.checkpoint.index.names import canonical_fqn, flat_key, names_without_wrappers
from labkit.checkpoint.index.sections import Nest, name_in, nest_of


@dataclass(frozen=True)
class ModelBeside:
    """A dict that holds a model.

    Attributes:
        where: The dict's full key, such as ``s0.model``; empty for the top level.
        names: Maps each parameter's name, with and without wrappers, to the name without.
        shapes: Maps each name without wrappers to its shape.
    """

    where: str
    names: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return a parameter's full key, including the dicts around it."""
        return f"{self.where}.{name}" if self.where else name

    @property
    def heads(self) -> list[str]:
        """Return the prefixes that a name in this dict may have: none, ``model.``, ``s0.model.``."""
        steps = self.where.split(".") if self.where else []
        return ["", *(f"{'.'.join(steps[at:])}." for at in range(len(steps) - 1, -1, -1))]


def models_beside(checkpoint: Checkpoint, root: Path_) -> list[list[ModelBeside]]:
    """Return the models around an optimizer, nearest first: from the dict that holds it out to the whole checkpoint.

    Flat parameters are left out.

    Args:
        checkpoint: A classified checkpoint.
        root: The optimizer's path.
    """
    written = _written(checkpoint)
    levels = []
    for depth in range(max(len(root) - 1, 0), -1, -1):
        level: dict[Path_, ModelBeside] = {}
        for entry in checkpoint.section("model"):
            if entry.path[:depth] != root[:depth] or is_flat(entry):
                continue
            nest = entry.path[: depth + 1] if len(entry.path) > depth + 1 else entry.path[:depth]
            model = level.setdefault(nest, ModelBeside(flat_key(nest)))
            name = written[entry.key].removeprefix(f"{model.where}.") if model.where else written[entry.key]
            model.names.update({canonical_fqn(flat_key(entry.path[len(nest) :])): name, name: name})
            model.shapes[name] = entry.shape
        levels.append(list(level.values()))
    return levels


def _written(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the full names of the models' tensors without wrappers, as a migration writes them."""
    nests: dict[Nest, dict[str, str]] = {}
    for entry in checkpoint.section("model"):
        nests.setdefault(nest_of(entry.path), {})[name_in(entry.path)] = entry.key
    result = {}
    for nest, keys in nests.items():
        for name, clean in names_without_wrappers(keys).items():
            result[keys[name]] = flat_key((*nest, clean))
    return result
