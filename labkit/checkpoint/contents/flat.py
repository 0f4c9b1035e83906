"""Splitting of FSDP1's flat parameters.

A LOCAL state dict holds one flat, padded, sharded vector per FSDP unit and does not record what is in it. The layout must be
derived from the model: each unit owns the parameters below it that no inner unit owns, stored one after the other in the order of
``named_parameters``. With ``use_orig_params=True`` each one begins at a multiple of 16 bytes
(``torch/distributed/fsdp/_flat_param.py``, ``FlatParamHandle._init_flat_param_and_metadata``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from labkit.checkpoint.data.rank_shares import is_flat
from labkit.checkpoint.errors import CheckpointMismatchError, FQNMismatchError
from labkit.checkpoint.index.model import Checkpoint, TensorEntry
from labkit.checkpoint.index.names import FLAT_PARAMETER, canonical_fqn, fqn_of
from labkit.checkpoint.index.sections import model_nest, name_in

_ALIGN_BYTES = 16


@dataclass(frozen=True)
class ParameterList:
    """A model's parameters in order, to identify those that a checkpoint only numbers or concatenates.

    Attributes:
        shapes: Canonical name to shape, in the order of ``named_parameters``.
        tied: Additional names of tied parameters, each mapped to the first name.
        trainable: The names of parameters with ``requires_grad``.
        tensors: Canonical name to shape of all tensors in its ``state_dict()``, including tied names and persistent buffers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    trainable: frozenset[str]
    tensors: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: torch.nn.Module) -> ParameterList:
        """Build the list from a model (on the meta device, for instance)."""
        fqn = fqn_of(model)
        first: dict[int, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        tied: dict[str, str] = {}
        trainable = set()
        for raw, parameter in model.named_parameters(remove_duplicate=False):
            name = fqn(raw)
            owner = first.setdefault(id(parameter), name)
            if owner == name:
                shapes[name] = tuple(parameter.shape)
                if parameter.requires_grad:
                    trainable.add(name)
            else:
                tied[name] = owner
        tensors = {fqn(name): tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        return cls(shapes, tied, frozenset(trainable), tensors)


@dataclass(frozen=True)
class Stretch:
    """The position of a parameter in a flat parameter."""

    name: str
    start: int
    shape: tuple[int, ...]


def units_of(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Return the flat parameters by the canonical name of their unit; the root's name is empty.

    Raises:
        CheckpointFormatError: They are nested under several keys, so it is unclear which of those is the model.
    """
    flat = [entry for entry in checkpoint.section("model") if is_flat(entry)]
    if flat:
        model_nest(checkpoint)
    return {canonical_fqn(name_in(entry.path)).removesuffix(FLAT_PARAMETER).rstrip("."): entry for entry in flat}


def layout(
    units: Mapping[str, TensorEntry], parameters: ParameterList, outside: frozenset[str], num_ranks: int, path: object
) -> dict[str, list[Stretch]]:
    """Compute the position of each parameter, per unit.

    Args:
        units: Unit name to its flat parameter.
        parameters: The model's parameters.
        outside: Names that the checkpoint holds separately (ignored parameters); no unit owns them.
        num_ranks: Number of ranks that shared each unit.
        path: The checkpoint, for messages.

    Raises:
        FQNMismatchError: A unit would own no parameter, or no unit would own a parameter.
        CheckpointMismatchError: The flat length fits no known layout, or fits two.
    """
    owned: dict[str, list[str]] = {unit: [] for unit in units}
    for name in parameters.shapes:
        if name in outside:
            continue
        owner = next((unit for unit in _outwards(name) if unit in units), None)
        if owner is None:
            raise FQNMismatchError(path, missing=[f"the unit that holds {name}"])
        owned[owner].append(name)
    empty = [unit or "the root" for unit, names in owned.items() if not names]
    if empty:
        raise FQNMismatchError(
            path, unexpected=[f"the flat parameter of {unit}, which has no parameters in the model" for unit in empty]
        )
    return {unit: _one_unit(units[unit], names, parameters, num_ranks, path) for unit, names in owned.items()}


def _outwards(name: str) -> Iterator[str]:
    """Yield the modules around a parameter, from the innermost to the root, whose name is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _one_unit(flat: TensorEntry, names: Sequence[str], parameters: ParameterList, num_ranks: int, path: object) -> list[Stretch]:
    total = sum(prod(parameters.shapes[name]) for name in names)
    fitting = [aligned(names, parameters, 1)[0]] if flat.numel == total else []
    # use_orig_params=True: aligned by the dtype of the computation, then padded to a multiple of the number of ranks.
    for itemsize in dict.fromkeys((flat.dtype.itemsize, 2, 4, 8)):
        stretches, end = aligned(names, parameters, max(_ALIGN_BYTES // itemsize, 1))
        if flat.numel == end + -end % num_ranks and stretches not in fitting:
            fitting.append(stretches)
    if not fitting:
        raise CheckpointMismatchError(
            path,
            [f"{flat.key} has {flat.numel} elements, and the model's parameters there ({', '.join(names[:4])}, ...) have {total}"],
            advice="Name the model that this checkpoint was saved from, and the directory with the files of all ranks together.",
        )
    if len(fitting) > 1:
        raise CheckpointMismatchError(
            path,
            [f"{flat.key} fits several layouts of its parameters"],
            advice="Save a FULL or SHARDED state dict from the old code instead.",
        )
    return fitting[0]


def aligned(names: Sequence[str], parameters: ParameterList, align: int) -> tuple[list[Stretch], int]:
    """Return the positions of parameters stored one after another at multiples of ``align`` elements, and the end of the last."""
    stretches, at = [], 0
    for name in names:
        at += -at % align
        shape = parameters.shapes[name]
        stretches.append(Stretch(name, at, shape))
        at += prod(shape)
    return stretches, at
