"""Exercise 4 of notebook 05: the norm of all gradients where parameters live on different meshes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any

from labkit.course.checks import Pool, ask, from_cell, refuse, require_on_ranks
from labkit.errors import ExerciseError

# Of one parameter a rank may send this many elements: its share of the norm over a few axes, never the gradient.
_FEW = 16


@dataclass(frozen=True)
class Seen:
    """What one rank measured.

    Attributes:
        norm: What ``grad_norm`` returned.
        truth: The norm of the whole gradients.
        sent: Elements that this rank put into collectives, those that DTensor starts among them, per parameter with a gradient.
        guesses: The norms that known mistakes give on this rank, by the mistake's name.
    """

    norm: float
    truth: float
    sent: float
    guesses: dict[str, float]


def check_grad_norm(pool: Pool, *, timeout_s: float = 60.0) -> str:
    """Exercise 4: ``grad_norm(model)`` returns the norm of all gradients, on every rank, without gathering a gradient.

    Args:
        pool: The pool; ``grad_norm`` is defined on its ranks.
        timeout_s: Seconds after which a rank counts as hung.

    Returns:
        A line with the norm and what was sent for it.

    Raises:
        ExerciseError: A rank has another norm, or whole gradients were sent.
        RunTimeoutError: The ranks called different collectives.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    require_on_ranks(pool, "grad_norm")
    seen = pool.run(_measure, timeout_s=timeout_s)
    for rank, found in seen.items():
        if not isclose(found.norm, found.truth, rel_tol=1e-5):
            refuse(
                f"rank {rank} has the norm {found.norm:.6g}, off by {found.norm - found.truth:+.3g}.",
                f"{found.truth:.6g} on every rank.",
                _hint(found),
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
            "the norm is right, and no collective was seen that brought it. Compute it from the gradients of the model."
        )
    norm = seen[0].truth
    note = "" if pool.world_size > 1 else " One rank cannot show more: it holds everything once."
    return f"Solved: {norm:.6g} on every rank, with {worst:.1f} elements sent per parameter.{note}"


def _hint(found: Seen) -> str:
    for name, hint in _HINTS.items():
        if isclose(found.norm, found.guesses[name], rel_tol=1e-5):
            return hint
    return "Square, add up over what each rank holds *once*, and take the root at the very end."


_HINTS = {
    "local": "That is the norm of what this rank holds. The others have to hear of it.",
    "copies": "Some gradients lie on several ranks, and you count each copy. Whose mesh says that, and on which axis?",
    "dp only": "You add up over the dp axis only; what TP has cut lies on the other axis.",
    "sum of norms": "Norms do not add up, their squares do: sqrt(a**2 + b**2), also between parameters.",
    "square": "That is the square of the norm: the root is missing.",
    "own mesh": "You add up over each parameter's mesh also along the axes where it is copied.",
}


def _measure() -> Seen:
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    device, world_size = from_cell("device"), from_cell("world_size")
    model = _model(device, world_size)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole = [float(grad.full_tensor().double().norm()) for grad in grads if isinstance(grad, DTensor)]
    local = [float(grad.to_local().double().square().sum()) for grad in grads if isinstance(grad, DTensor)]
    counter = _counter()
    with counter:
        answer = ask(from_cell("grad_norm"), model, case="a model of six parameters")
    norm = _as_number(answer)
    everyone = _added(torch.tensor(sum(local), dtype=torch.float64, device=device))
    own_mesh = dp_only = 0.0
    for grad, value in zip(grads, local, strict=True):
        assert isinstance(grad, DTensor)
        times = 1
        for axis, placement in enumerate(grad.placements):
            times *= grad.device_mesh.size(axis) if isinstance(placement, Replicate) else 1
        own_mesh += float(grad.full_tensor().double().square().sum()) * times
        dp_only += _added(torch.tensor(value, dtype=torch.float64, device=device), grad.device_mesh.get_group(0))
    truth = sqrt(sum(value**2 for value in whole))
    guesses = {
        "local": sqrt(sum(local)),
        "own mesh": sqrt(own_mesh),
        "copies": sqrt(everyone),
        "dp only": sqrt(dp_only),
        "sum of norms": sum(whole),
        "square": truth**2,
    }
    # A mistake that makes no difference on this mesh explains nothing.
    guesses = {name: guess if not isclose(guess, truth, rel_tol=1e-5) else float("nan") for name, guess in guesses.items()}
    return Seen(norm, truth, counter.elements / len(grads), guesses)


def _as_number(answer: Any) -> float:
    try:
        return float(answer)
    except (TypeError, ValueError, RuntimeError):
        raise ExerciseError(f"grad_norm returned {type(answer).__name__}. It has to return one number.") from None


def _added(value: Any, group: Any = None) -> float:
    import torch.distributed as dist

    dist.all_reduce(value, group=group)
    return float(value)


def _model(device: Any, world_size: int) -> Any:
    """Gradients on a two-axis mesh (cut twice, or cut once and copied), and on its dp axis alone; one parameter has none."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    across = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world_size // across, across), mesh_dim_names=("dp", "tp"))
    layouts: dict[str, tuple[tuple[int, ...], Any, list[Any]]] = {
        "twice": ((24, 16), mesh, [Shard(0), Shard(1)]),
        "uneven": ((7, 30), mesh, [Shard(0), Shard(0)]),
        "copied on dp": ((18, 16), mesh, [Replicate(), Shard(0)]),
        "copied on tp": ((10, 6), mesh, [Shard(0), Replicate()]),
        "norm": ((320,), mesh["dp"], [Shard(0)]),
        "frozen": ((4,), mesh["dp"], [Shard(0)]),
    }
    model = torch.nn.Module()
    generator = torch.Generator().manual_seed(5)
    for name, (shape, where, placements) in layouts.items():
        full = torch.randn(shape, generator=generator).to(device)
        parameter = torch.nn.Parameter(distribute_tensor(full, where, placements))
        if name != "frozen":
            parameter.grad = distribute_tensor(full * 0.5, where, placements)
        model.register_parameter(name, parameter)
    return model


def _counter() -> Any:
    """A context manager that counts the elements which this rank puts into collectives."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    class Counter(TorchDispatchMode):
        elements = 0

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # DTensor has to do its part first: it starts collectives of its own, and those come here with plain tensors.
            if any(issubclass(one, DTensor) for one in types):
                return NotImplemented
            helper = func.__name__.startswith(("wait", "_"))
            if func.namespace in ("c10d", "_c10d_functional") and not helper:
                held = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
                self.elements += min((tensor.numel() for tensor in held), default=0)
            return func(*args, **(kwargs or {}))

    return Counter()
