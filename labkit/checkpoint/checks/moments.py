"""Search for pieces of optimizer state that do not have their parameter's shape.

| a piece | must have its parameter's shape |
| --- | --- |
| one of :data:`MOMENTS`, kept by elementwise optimizers, if all other pieces of the parameter are moments or counters | yes |
| a counter (:data:`COUNTERS`) | no |
| any other: factored moments (Adafactor's ``row_var``), preconditioners, and pieces beside them, such as low-rank moments beside \
a projector | unknown, so not checked |

When numbers have just been mapped to names, one more case is an error: other pieces have the parameters' shapes, but in a different
order. Names are compared without wrappers. If several models have a parameter of this name, matching any one of them is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from labkit.checkpoint.index.names import match_names

#: Adam and its kin; Adamax; RMSprop, Adadelta; Adagrad; SGD, Muon; ASGD; Rprop; Adafactor, for vectors.
MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "momentum_buffer", "ax", "prev", "step_size", "variance"}
)
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})

Shape = tuple[int, ...]
#: For each model that the state may belong to: parameter name to shape.
Models = Sequence[Mapping[str, Shape]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of an optimizer's state.

    Attributes:
        key: Its name in the checkpoint.
        parameter: The parameter's name.
        name: The piece's own name, such as ``exp_avg``.
        shape: Its shape.
    """

    key: str
    parameter: str
    name: str
    shape: Shape


def misshapen(
    pieces: Iterable[Piece], beside: Mapping[str, Iterable[str]], models: Models, *, permuted: bool = False
) -> list[tuple[Piece, Shape]]:
    """Return the pieces with a wrong shape, each with its parameter's shape.

    Args:
        pieces: The tensors of one optimizer's state, by names.
        beside: Parameter to the names of all its pieces, including those that are not tensors.
        models: The models that the state may belong to. Parameters that none of them has are not checked.
        permuted: Whether numbers have just been mapped to names; then the right shapes in the wrong order mean a wrong mapping.
    """
    pieces = list(pieces)
    wanted = _shapes(dict.fromkeys(piece.parameter for piece in pieces), models)
    elementwise = {parameter for parameter in wanted if (MOMENTS | COUNTERS).issuperset(beside[parameter])}
    judged = {piece.key for piece in pieces if piece.name in MOMENTS and piece.parameter in elementwise}
    if permuted:
        others: dict[str, list[Piece]] = {}
        for piece in pieces:
            if piece.name not in COUNTERS and piece.parameter in wanted:
                others.setdefault(piece.name, []).append(piece)
        for same in others.values():
            if Counter(piece.shape for piece in same) == Counter(wanted[piece.parameter][0] for piece in same):
                judged.update(piece.key for piece in same)
    return [
        (piece, wanted[piece.parameter][0])
        for piece in pieces
        if piece.key in judged and piece.parameter in wanted and piece.shape not in wanted[piece.parameter]
    ]


def _shapes(parameters: Iterable[str], models: Models) -> dict[str, list[Shape]]:
    names = list(parameters)
    found: dict[str, list[Shape]] = {}
    for model in models:
        for name, partner in match_names(names, model).items():
            found.setdefault(name, []).append(model[partner])
    return found
