"""Exercise 2 of notebook 02: hooks that move activations and leave weights alone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.course.checks import Pool, ask, from_cell, hint_for, refuse, require_on_ranks, run_on_ranks
from labkit.errors import ExerciseError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class _Seen:
    """What the hooks did on one rank.

    Attributes:
        error: What they raised.
        moved_weights: Bytes of weights that came back as another tensor.
        kept_weights: Bytes of weights that stayed.
        kept_activations: Bytes of activations that came back as the same memory.
        num_activations: Activations that were saved.
        changed: Saved tensors that came back with other values, as words.
        mixed_up: Which different tensors the hooks take for one: ``views`` or ``reused``, empty if they tell them apart.
        looks_like_weights: Whether all activations that stayed have the shape of a weight, while others moved.
        wrong_gradients: Parameters whose gradients differ.
        moved_bytes: Bytes of activations that moved.
    """

    error: str
    moved_weights: int = 0
    kept_weights: int = 0
    kept_activations: int = 0
    num_activations: int = 0
    changed: str = ""
    mixed_up: str = ""
    looks_like_weights: bool = False
    wrong_gradients: int = 0
    moved_bytes: int = 0


def check_hooks(pool: Pool, *, timeout_s: float = 60.0) -> str:
    """Exercise 2: ``make_hooks(model)`` gives ``pack`` and ``unpack`` that move every activation, no weight, and change nothing.

    On each rank they are tried on a model that saves weights as they are and as views, activations that look like weights, two
    views of one piece of memory, and two dtypes; and on memory that is used again.

    Args:
        pool: The pool; ``make_hooks`` is defined on its ranks.
        timeout_s: Seconds after which a rank counts as hung.

    Returns:
        A line with the bytes that moved.

    Raises:
        ExerciseError: With what the hooks moved, kept or changed.

    Ranks: controller.
    """
    require_on_ranks(pool, "make_hooks")
    for rank, seen in run_on_ranks(pool, _try_hooks, timeout_s=timeout_s).items():
        if seen.error:
            refuse(f"The hooks raised on rank {rank}: {seen.error}.", "forward and backward run.", hint_for(seen.error, _ERRORS))
        if seen.changed:
            hint = _MIXED_UP.get(seen.mixed_up, _CHANGED)
            refuse(f"A saved tensor came back changed on rank {rank}: {seen.changed}.", "the same dtype, shape and values.", hint)
        if seen.moved_weights:
            hint = (
                "Some stayed, so you tell weights apart. But most are saved as a view of themselves, transposed for example: "
                "another tensor, of another shape, over the same memory. Compare the memory behind it."
                if seen.kept_weights
                else "Weights stay on the device anyway: a copy costs bus and memory and saves nothing. Tell them apart in pack, "
                "by the memory behind them."
            )
            refuse(f"{seen.moved_weights:,} bytes of weights moved on rank {rank}.", "0.", hint)
        if seen.kept_activations:
            hint = (
                "An activation can have the shape of a weight, and these have. Tell weights apart by the memory behind them."
                if seen.looks_like_weights
                else "They came back as the very same memory, so nothing was freed. On a CPU tensor.cpu() and "
                "tensor.to('cpu') copy nothing; ask for a copy."
            )
            refuse(f"{seen.kept_activations:,} bytes of activations did not move on rank {rank}.", "0.", hint)
        if seen.wrong_gradients:
            refuse(f"{seen.wrong_gradients} gradients differ on rank {rank}.", "all are equal bit for bit.")
    return (
        f"Solved: on every rank {seen.num_activations} activations with {seen.moved_bytes:,} bytes moved, no weight did, and all "
        "gradients are equal bit for bit."
    )


_CHANGED = (
    "A tensor has to come back with the dtype, the shape and the values that it left with, also one that pack left where it was. "
    "Gradients are exact or wrong."
)
_MIXED_UP = {
    "views": "Two tensors can be views of one piece of memory, with other shapes. The memory alone does not name a tensor.",
    "reused": "Memory that is freed during forward is used again for the next tensor. An address does not name a tensor for good.",
}
_ERRORS = [
    (lambda text: "make_hooks returned" in text, "Return the two functions: return pack, unpack."),
    (lambda text: "device" in text, "A tensor has to come back to the device that it left."),
    (lambda text: True, "unpack gets exactly what pack returned, and has to return a tensor."),
]


def _model() -> nn.Module:
    import torch
    from torch import nn

    class Mixed(nn.Module):
        """Saves weights as they are (scale) and as views (the linear maps), and two views of one activation."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 12, bias=False), nn.Linear(12, 4, bias=False)
            self.scale = nn.Parameter(torch.full((12,), 1.5))

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.first(x).chunk(2, dim=1)
            h = torch.cat([left * right.sigmoid(), right], dim=1) * self.scale
            h = h.to(torch.float64).exp().to(torch.float32)
            out: Tensor = self.last(h).square()
            return out

    torch.manual_seed(0)
    return Mixed()


def _try_hooks() -> _Seen:
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    device = from_cell("device")
    model = _model().to(device)
    x = torch.linspace(-1, 1, 96, device=device).view(12, 8).requires_grad_()  # as large as a weight
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    watch: _Watch | None = None
    try:
        make_hooks = from_cell("make_hooks")
        hooks = ask(make_hooks, model, case="a model of two linear layers")
        if not (isinstance(hooks, tuple | list) and len(hooks) == 2 and all(map(callable, hooks))):
            return _Seen(f"make_hooks returned {type(hooks).__name__}")
        watch = _Watch(hooks[0], hooks[1], list(model.parameters()))
        with saved_tensors_hooks(watch.pack, watch.unpack):
            loss = model(x).sum()
        loss.backward()
        watch.look_for_mix_ups(make_hooks(model))
    except ExerciseError:
        raise
    except Exception as error:  # whatever a learner's code raises is shown to them
        if watch is not None and watch.found["changed"]:
            with suppress(Exception):  # it only makes the hint better
                watch.look_for_mix_ups(make_hooks(model))
            return _Seen("", **watch.found)  # what made backward fail
        return _Seen(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    got = [parameter.grad for parameter in model.parameters()]
    wrong = sum(not _same(a, b) for a, b in zip(got, expected, strict=True))
    return _Seen("", wrong_gradients=wrong, **watch.found)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    import torch

    return left is not None and right is not None and torch.equal(left, right)


class _Watch:
    """Stands between autograd and the learner's hooks, and looks at what comes back."""

    def __init__(self, pack: Any, unpack: Any, weights: list[Tensor]) -> None:
        self._pack, self._unpack = pack, unpack
        self._weights = [weight.untyped_storage()._cdata for weight in weights]
        self._shapes = {tuple(weight.shape) for weight in weights} | {tuple(weight.shape[::-1]) for weight in weights}
        self.found: dict[str, Any] = {
            "moved_weights": 0,
            "kept_weights": 0,
            "kept_activations": 0,
            "num_activations": 0,
            "changed": "",
            "mixed_up": "",
            "looks_like_weights": True,
            "moved_bytes": 0,
        }

    def pack(self, tensor: Tensor) -> Any:
        import torch

        before, storage = tensor.detach().clone(), tensor.untyped_storage()._cdata
        packed = self._pack(tensor)
        back = self._unpack(packed)
        if not isinstance(back, torch.Tensor):
            raise TypeError(f"unpack returned {type(back).__name__}")
        if (back.dtype, back.shape, back.device) != (before.dtype, before.shape, before.device):
            self.found["changed"] = f"{_kind(before)} left, {_kind(back)} came back"
        elif not torch.equal(back, before):
            self.found["changed"] = "it has other values"
        stayed = back.untyped_storage()._cdata == storage
        if storage in self._weights:
            self.found["kept_weights" if stayed else "moved_weights"] += tensor.nbytes
        else:
            self.found["num_activations"] += 1
            self.found["kept_activations" if stayed else "moved_bytes"] += tensor.nbytes
            # Told apart by shape: what looks like a weight stays, everything else moves.
            self.found["looks_like_weights"] &= stayed == (tuple(tensor.shape) in self._shapes)
        return packed

    def unpack(self, packed: Any) -> Any:
        return self._unpack(packed)

    def look_for_mix_ups(self, hooks: Any) -> None:
        """Try new hooks on tensors that share an address, at one time and one after the other."""
        import torch

        pack, unpack = hooks

        def is_right(tensor: Tensor) -> bool:
            expected = tensor.clone()
            back = unpack(pack(tensor))
            return (back.dtype, back.shape) == (expected.dtype, expected.shape) and torch.equal(back, expected)

        if not is_right(torch.arange(35.0).view(5, 7) / 7):
            return  # wrong already for one tensor
        both = torch.arange(24.0).view(4, 6)
        memory = bytearray(32)
        # A buffer makes certain what an allocator does often: a new tensor where one was freed.
        earlier = is_right(torch.frombuffer(memory, dtype=torch.float32))
        memory[:] = bytes(range(32))
        if not (earlier and is_right(torch.frombuffer(memory, dtype=torch.float32))):
            self.found["mixed_up"] = "reused"
        elif not all(map(is_right, (both, both[:, :3], both[:, 3:], both.t()))):
            self.found["mixed_up"] = "views"
        if self.found["mixed_up"]:
            self.found["changed"] = self.found["changed"] or "another tensor came back from the same memory"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"
