"""Torch's modes that an interrupt left on are off again in the next run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.worker.mend.thread_modes import ThreadModes


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the mode is still on")


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the mode is still on")


def _pack(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the hook is still there")


@pytest.mark.parametrize(
    "enter",
    [
        torch.no_grad().__enter__,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16).__enter__(),
        lambda: torch.autograd.graph.saved_tensors_hooks(_pack, _pack).__enter__(),
        lambda: _Functions().__enter__(),
        lambda: _Dispatch().__enter__(),
        lambda: torch.device("meta").__enter__(),
    ],
    ids=["no_grad", "autocast", "saved tensors", "functions", "dispatch", "device"],
)
def test_a_mode_that_nobody_left_is_left(enter: Callable[[], Any]) -> None:
    modes = ThreadModes()
    enter()
    modes.restore()
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ weight
    assert (product.dtype, product.device.type, product.requires_grad) == (torch.float32, "cpu", True)
    product.sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 4.0))  # type: ignore[arg-type]


def test_a_mode_that_was_on_before_stays_on() -> None:
    with torch.no_grad():
        modes = ThreadModes()
        torch.set_grad_enabled(True)
        modes.restore()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
