"""Exercise 4 of notebook 05: the norm of all gradients when parameters are on different meshes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any

from labkit.course.labs.checks import Pool, ask, from_cell, refuse, require_on_ranks, run_on_ranks
from labkit.course.labs.lab05.grad_norm_model import norm_model
from labkit.errors import ExerciseError

# How many elements a rank may send per parameter: enough for its share of the norm over a few axes, but not for a gradient.
_FEW = 16


@dataclass(frozen=True)
class NormsSeen:
    """The measurements of one rank.

    Attributes:
        norm: The result of ``grad_norm``.
        truth: The norm of the whole gradients.
        sent: Elements per parameter with a gradient that this rank passed to collectives, including those that DTensor starts.
        num_changed: Number of gradients that were changed.
        num_grads: Number of parameters with a gradient.
        guesses: The norms that known mistakes give on this rank, by the mistake's name.
    """

    norm: float
    truth: float
    sent: float
    num_changed: int
    num_grads: int
    guesses: dict[str, float]


def check_grad_norm(pool: Pool, *, timeout_s: float = 60.0) -> str:
    """Exercise 4: ``grad_norm(model)`` returns the norm of all gradients, on every rank, without gathering a gradient.

    Args:
        pool: The pool; ``grad_norm`` is defined on its ranks.
        timeout_s: Seconds after which a rank counts as hung.

    Returns:
        A line with the norm and the number of elements sent for it.

    Raises:
        ExerciseError: A rank has a different norm, whole gradients were sent, or gradients were changed.
        RunTimeoutError: The ranks called different collectives.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "grad_norm")
    seen = run_on_ranks(pool, _measure, timeout_s=timeout_s)
    for rank, found in seen.items():
        if not isclose(found.norm, found.truth, rel_tol=1e-5):
            refuse(
                f"rank {rank} has the norm {found.norm:.6g}, off by {found.norm - found.truth:+.3g}.",
                f"{found.truth:.6g} on every rank.",
                _hint(found),
            )
    if changed := max(found.num_changed for found in seen.values()):
        refuse(
            f"the norm is right, but {changed} of {seen[0].num_grads} gradients have changed afterwards.",
            "unchanged gradients.",
            "clip_grad_norm_ scales the gradients; get_total_norm only measures. Clipping is the next step, with the common norm.",
        )
    worst = max(found.sent for found in seen.values())
    if worst > _FEW:
        refuse(
            f"the norm is right, but a rank sends {worst:.0f} elements per parameter.",
            f"at most {_FEW}.",
            "You gather gradients. A rank can square and add up what it holds; only sums have to travel.",
        )
    if not worst and pool.world_size > 1:
        raise ExerciseError(
            "the norm is right, but no collective was seen that could give it. Compute it from the gradients of the model."
        )
    norm = seen[0].truth
    note = "" if pool.world_size > 1 else " One rank cannot show more: it holds everything once."
    return f"Solved: {norm:.6g} on every rank, with {worst:.1f} elements sent per parameter.{note}"


def _hint(found: NormsSeen) -> str:
    for name, hint in _HINTS.items():
        if isclose(found.norm, found.guesses[name], rel_tol=1e-5):
            return hint
    return "Square, add up over what each rank holds *once*, and take the root at the very end."


_HINTS = {
    "strided": "You take a strided cut for a copy. _StridedShard is not a Shard, and its is_shard() is False: use is_replicate().",
    "local": "That is the norm of what this rank holds. Combine it with those of the other ranks.",
    "copies": "Some gradients lie on several ranks, and you count each copy. Whose mesh says that, and on which axis?",
    "dp only": "You add up over the dp axis only, but TP has cut along the other axis.",
    "sum of norms": "Norms do not add up, their squares do: sqrt(a**2 + b**2), also between parameters.",
    "square": "That is the square of the norm: the root is missing.",
    "own mesh": "You add up over each parameter's mesh also along the axes where it is copied.",
}


def _measure() -> NormsSeen:
    import torch

    model = norm_model()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters]
    before = [grad.to_local().clone() for grad in grads]
    truth, guesses = _norms(grads)
    counter = _counter()
    with counter:
        answer = _asked(model)
    same = [
        parameter.grad is not None and torch.equal(parameter.grad.to_local(), local)
        for parameter, local in zip(parameters, before, strict=True)
    ]
    return NormsSeen(_as_number(answer), truth, counter.elements / len(grads), same.count(False), len(grads), guesses)


def _asked(model: Any) -> Any:
    """Call ``grad_norm`` and return its result. The case, for messages, is a call that works in a cell."""
    try:
        return ask(from_cell("grad_norm"), model, case="grad_norm(norm_model())")
    except ExerciseError as error:
        said = str(error.__cause__ or "")
        if "mesh" not in said:
            raise
        # Shorten torch's message, which describes the layout of every gradient in several kilobytes.
        refuse(
            f"grad_norm raised {type(error.__cause__).__name__}: {said.splitlines()[0][:100]} ...",
            "one number from gradients on two meshes.",
            "torch refuses gradients of two meshes, as in clip_grad_norm_ above. Take one mesh at a time.",
        )


def _norms(grads: list[Any]) -> tuple[float, dict[str, float]]:
    """Return the norm of the whole gradients, and the norms that known mistakes produce on this rank."""
    import torch

    whole = [float(grad.full_tensor().double().norm()) for grad in grads]
    local = [float(grad.to_local().double().square().sum()) for grad in grads]
    own_mesh = dp_only = strided = 0.0
    for grad, norm, value in zip(grads, whole, local, strict=True):
        square, shards_only = (torch.tensor(value, dtype=torch.float64, device=grad.device) for _ in range(2))
        copies = 1
        for axis, placement in enumerate(grad.placements):
            copies *= grad.device_mesh.size(axis) if placement.is_replicate() else 1
            if placement.is_shard():
                _added(shards_only, grad.device_mesh.get_group(axis))
        own_mesh += norm**2 * copies
        dp_only += _added(square, grad.device_mesh.get_group(0))
        strided += float(shards_only)
    truth = sqrt(sum(value**2 for value in whole))
    everyone = _added(torch.tensor(sum(local), dtype=torch.float64, device=grads[0].device))
    guesses = {
        "strided": sqrt(strided),
        "local": sqrt(sum(local)),
        "own mesh": sqrt(own_mesh),
        "copies": sqrt(everyone),
        "dp only": sqrt(dp_only),
        "sum of norms": sum(whole),
        "square": truth**2,
    }
    # Mistakes that make no difference on this mesh explain nothing.
    return truth, {name: guess if not isclose(guess, truth, rel_tol=1e-5) else float("nan") for name, guess in guesses.items()}


def _as_number(answer: Any) -> float:
    try:
        return float(answer)
    except (TypeError, ValueError, RuntimeError):
        raise ExerciseError(f"grad_norm returned {type(answer).__name__}. It has to return one number.") from None


def _added(value: Any, group: Any = None) -> float:
    import torch.distributed as dist

    dist.all_reduce(value, group=group)
    return float(value)


def _counter() -> Any:
    """Return a context manager that counts the elements that this rank passes to collectives."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    class Counter(TorchDispatchMode):
        elements = 0

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Let DTensor do its part first: the collectives that it starts arrive here with plain tensors.
            if any(issubclass(one, DTensor) for one in types):
                return NotImplemented
            helper = func.__name__.startswith(("wait", "_"))
            if func.namespace in ("c10d", "_c10d_functional") and not helper:
                held = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
                self.elements += min((tensor.numel() for tensor in held), default=0)
            return func(*args, **(kwargs or {}))

    return Counter()
