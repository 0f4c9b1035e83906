"""Exercise 2 of notebook 02: hooks that move activations and leave weights alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.course.checks import Pool, from_cell, hint_for, refuse, require_on_ranks

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
        wrong_gradients: Parameters whose gradients differ.
        moved_bytes: Bytes of activations that moved.
    """

    error: str
    moved_weights: int = 0
    kept_weights: int = 0
    kept_activations: int = 0
    num_activations: int = 0
    changed: str = ""
    wrong_gradients: int = 0
    moved_bytes: int = 0


def check_hooks(pool: Pool, *, timeout_s: float = 60.0) -> str:
    """Exercise 2: ``make_hooks(model)`` gives ``pack`` and ``unpack`` that move every activation, no weight, and change nothing.

    On each rank they are tried on a model that saves weights as they are and as views, in two dtypes.

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
    for rank, seen in pool.run(_try_hooks, timeout_s=timeout_s).items():
        if seen.error:
            refuse(f"The hooks raised on rank {rank}: {seen.error}.", "forward and backward run.", hint_for(seen.error, _ERRORS))
        if seen.changed:
            hint = "A tensor has to come back with the dtype and the values that it left with; gradients are exact or wrong."
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
                "They came back as the very same memory, so nothing was freed. On a CPU tensor.cpu() and tensor.to('cpu') copy "
                "nothing; ask for a copy."
            )
            refuse(f"{seen.kept_activations:,} bytes of activations did not move on rank {rank}.", "0.", hint)
        if seen.wrong_gradients:
            refuse(f"{seen.wrong_gradients} gradients differ on rank {rank}.", "all are equal bit for bit.")
    return (
        f"Solved: on every rank {seen.num_activations} activations with {seen.moved_bytes:,} bytes moved, no weight did, and all "
        "gradients are equal bit for bit."
    )


_ERRORS = [
    (lambda text: "make_hooks returned" in text, "Return the two functions: return pack, unpack."),
    (lambda text: "device" in text, "A tensor has to come back to the device that it left."),
    (lambda text: True, "unpack gets exactly what pack returned, and has to return a tensor."),
]


def _model() -> nn.Module:
    import torch
    from torch import nn

    class Mixed(nn.Module):
        """Saves weights as they are (scale), as views (the linear maps), and activations in two dtypes."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 12, bias=False), nn.Linear(12, 4, bias=False)
            self.scale = nn.Parameter(torch.full((12,), 1.5))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).sigmoid() * self.scale
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
    x = torch.linspace(-1, 1, 40, device=device).view(5, 8).requires_grad_()
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    watch: _Watch | None = None
    try:
        hooks = from_cell("make_hooks")(model)
        if not (isinstance(hooks, tuple | list) and len(hooks) == 2 and all(map(callable, hooks))):
            return _Seen(f"make_hooks returned {type(hooks).__name__}")
        watch = _Watch(hooks[0], hooks[1], [parameter.untyped_storage()._cdata for parameter in model.parameters()])
        with saved_tensors_hooks(watch.pack, watch.unpack):
            loss = model(x).sum()
        loss.backward()
    except Exception as error:  # whatever a learner's code raises is shown to them
        if watch is not None and watch.found["changed"]:
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

    def __init__(self, pack: Any, unpack: Any, weights: list[int]) -> None:
        self._pack, self._unpack, self._weights = pack, unpack, weights
        self.found: dict[str, Any] = {
            "moved_weights": 0,
            "kept_weights": 0,
            "kept_activations": 0,
            "num_activations": 0,
            "changed": "",
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
        return packed

    def unpack(self, packed: Any) -> Any:
        return self._unpack(packed)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"
