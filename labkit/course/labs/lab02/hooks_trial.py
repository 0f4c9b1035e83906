"""Exercise 2 of notebook 02 on a rank: a training step with the learner's hooks, and its effects."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.course.labs.checks import ask, from_cell, hint_for, refuse
from labkit.errors import ExerciseError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class HookEffects:
    """The effects of the hooks on one rank.

    Attributes:
        error: The error that forward or backward raised because of them.
        moved_weights: Bytes of weights that came back as a different tensor.
        kept_weights: Bytes of weights that stayed.
        moves_parts_only: Whether every moved weight is a part that begins inside a weight's memory.
        kept_activations: Bytes of activations that came back as the same memory.
        copies_others: Whether a tensor unrelated to the model came back in different memory.
        leaves_device: Whether ``pack`` returns a host tensor for a GPU tensor; None if unknown.
        num_activations: Number of activations that were saved.
        changed: A description of a saved tensor that came back changed.
        mixed_up: Which different tensors the hooks confuse: ``views`` or ``reused``; empty if none.
        looks_like_weights: Whether all activations that stayed have a weight's shape, while others moved.
        wrong_gradients: Parameters whose gradients differ.
        moved_bytes: Bytes of activations that moved.
    """

    error: str
    moved_weights: int = 0
    kept_weights: int = 0
    moves_parts_only: bool = False
    kept_activations: int = 0
    copies_others: bool = False
    leaves_device: bool | None = None
    num_activations: int = 0
    changed: str = ""
    mixed_up: str = ""
    looks_like_weights: bool = False
    wrong_gradients: int = 0
    moved_bytes: int = 0


_SWAPPED = "It works the other way round: return pack first, then unpack."
# Tests on which hook raised, and its error.
_RAISED: list[tuple[Callable[[tuple[int, BaseException]], bool], str]] = [
    (
        lambda raised: "device string" in str(raised[1]) or "nvalid device" in str(raised[1]),
        'torch has no device of that name. The host\'s is "cpu", and tensor.device is the one that a tensor is on.',
    ),
    (
        lambda raised: raised[0] == 1 and not isinstance(raised[1], NameError),
        "unpack gets exactly what pack returned, and has to return a tensor.",
    ),
]


def _model() -> nn.Module:
    import torch
    from torch import nn

    class Mixed(nn.Module):
        """A model that saves weights unchanged (scale), as views (first) and in parts (last), plus two views of an activation."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
            self.scale = nn.Parameter(torch.full((12,), 1.5))

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.first(x).chunk(2, dim=1)
            h = torch.cat([left * right.sigmoid(), right], dim=1) * self.scale
            h = h.to(torch.float64).exp().to(torch.float32)
            up, down = (nn.functional.linear(h, half) for half in self.last.weight.chunk(2))
            out: Tensor = (up + down).square()
            return out

    torch.manual_seed(0)
    return Mixed()


def try_hooks() -> HookEffects:
    """Train the model for a step with this rank's ``make_hooks``, and record everything that the hooks receive and return.

    Raises:
        ExerciseError: The hooks raised or returned something other than a tensor.

    Ranks: local.
    """
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
            return HookEffects(f"make_hooks returned {type(hooks).__name__}")
        watch = _Watch(hooks[0], hooks[1], list(model.parameters()))
        with saved_tensors_hooks(watch.pack, watch.unpack):
            loss = model(x).sum()
        loss.backward()
        watch.look_for_mix_ups(make_hooks(model))
        watch.look_at_others(make_hooks(model))
    except ExerciseError:
        raise
    except Exception as error:  # any error of a learner's code is shown to them
        if watch is not None and watch.found["changed"]:
            with suppress(Exception):  # it only improves the hint
                watch.look_for_mix_ups(make_hooks(model))
            return HookEffects("", **watch.found)  # because of this, backward failed
        return HookEffects(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", **(watch.found if watch else {})
        )
    got = [parameter.grad for parameter in model.parameters()]
    wrong = sum(not _same(a, b) for a, b in zip(got, expected, strict=True))
    return HookEffects("", wrong_gradients=wrong, **watch.found)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    import torch

    return left is not None and right is not None and torch.equal(left, right)


class _Watch:
    """A layer between autograd and the learner's hooks, to inspect what comes back."""

    def __init__(self, pack: Any, unpack: Any, weights: list[Tensor]) -> None:
        self._hooks = pack, unpack
        self._weights = [weight.untyped_storage()._cdata for weight in weights]
        self._shapes = {tuple(weight.shape) for weight in weights} | {tuple(weight.shape[::-1]) for weight in weights}
        self.found: dict[str, Any] = {
            "moved_weights": 0,
            "kept_weights": 0,
            "moves_parts_only": True,
            "kept_activations": 0,
            "copies_others": False,
            "leaves_device": None,
            "num_activations": 0,
            "changed": "",
            "mixed_up": "",
            "looks_like_weights": True,
            "moved_bytes": 0,
        }

    def pack(self, tensor: Tensor) -> Any:
        import torch

        before, storage = tensor.detach().clone(), tensor.untyped_storage()._cdata
        packed = self._called(0, tensor, f"a saved {_kind(before)}")
        back = self._called(1, packed, f"what pack returned for {_kind(before)}")
        if not isinstance(back, torch.Tensor):
            hint = (
                _SWAPPED if _works_swapped(*self._hooks) else "unpack gets exactly what pack returned, and has to return a tensor."
            )
            refuse(f"unpack returned {type(back).__name__}.", "the tensor that pack got.", hint)
        if (back.dtype, back.shape, back.device) != (before.dtype, before.shape, before.device):
            self.found["changed"] = f"{_kind(before)} left, {_kind(back)} came back"
        elif not torch.equal(back, before):
            self.found["changed"] = "it has other values"
        stayed = back.untyped_storage()._cdata == storage
        if storage in self._weights:
            self._shapes.add(tuple(tensor.shape))
            self.found["kept_weights" if stayed else "moved_weights"] += tensor.nbytes
            self.found["moves_parts_only"] &= stayed or tensor.storage_offset() > 0
        else:
            self.found["num_activations"] += 1
            self.found["kept_activations" if stayed else "moved_bytes"] += tensor.nbytes
            # The hooks distinguish by shape if every tensor that looks like a weight stays and everything else moves.
            self.found["looks_like_weights"] &= stayed == (tuple(tensor.shape) in self._shapes)
        return packed

    def unpack(self, packed: Any) -> Any:
        return self._called(1, packed, "what pack returned")

    def _called(self, which: int, given: Any, case: str) -> Any:
        """Return a hook's result; if it raises, refuse it with the learner's line."""
        try:
            return ask(self._hooks[which], given, case=case)
        except ExerciseError as error:
            cause = error.__cause__
            if cause is None:  # not solved yet
                raise
            hint = _SWAPPED if _works_swapped(*self._hooks) else hint_for((which, cause), _RAISED)
            raise ExerciseError(f"{error}\nTarget: forward and backward run." + (f"\nHint: {hint}" if hint else "")) from cause

    def look_for_mix_ups(self, hooks: Any) -> None:
        """Try new hooks on tensors that share an address, at the same time and one after the other."""
        import torch

        pack, unpack = hooks

        def is_right(tensor: Tensor) -> bool:
            expected = tensor.clone()
            back = unpack(pack(tensor))
            return (back.dtype, back.shape) == (expected.dtype, expected.shape) and torch.equal(back, expected)

        if not is_right(torch.arange(35.0).view(5, 7) / 7):
            return  # already wrong for a single tensor
        both = torch.arange(24.0).view(4, 6)
        memory = bytearray(32)
        # Use a buffer so that the new tensor has the freed one's address; an allocator would not guarantee that.
        earlier = is_right(torch.frombuffer(memory, dtype=torch.float32))
        memory[:] = bytes(range(32))
        if not (earlier and is_right(torch.frombuffer(memory, dtype=torch.float32))):
            self.found["mixed_up"] = "reused"
        elif not all(map(is_right, (both, both[:, :3], both[:, 3:], both.t()))):
            self.found["mixed_up"] = "views"
        if self.found["mixed_up"]:
            self.found["changed"] = self.found["changed"] or "another tensor came back from the same memory"

    def look_at_others(self, hooks: Any) -> None:
        """Try new hooks on a tensor unrelated to the model, and on a fake GPU tensor, which needs no GPU."""
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        pack, unpack = hooks
        other = torch.arange(35.0).view(5, 7)
        self.found["copies_others"] = unpack(pack(other)).untyped_storage()._cdata != other.untyped_storage()._cdata
        # The mode would warn about every address that pack reads. Ignore errors: the missing GPU may be their only cause.
        with suppress(Exception), warnings.catch_warnings(action="ignore"), FakeTensorMode(allow_non_fake_inputs=True):
            places = {found.device.type for found in _tensors_in(pack(torch.empty(5, 7, device="cuda:0")))}
            self.found["leaves_device"] = "cuda" not in places if places else None


def _tensors_in(packed: Any) -> list[Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(packed)
    leaves += tree_leaves([vars(leaf) for leaf in leaves if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor)])
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _works_swapped(pack: Any, unpack: Any) -> bool:
    """Return whether the two functions work only in swapped order."""
    import torch

    one = torch.arange(6.0).view(2, 3)
    with suppress(Exception):
        packed = unpack(one)
        back = pack(packed)
        return not isinstance(packed, torch.Tensor) and isinstance(back, torch.Tensor) and torch.equal(back, one)
    return False


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"
