"""Torch's modes of the main thread, which an interrupt can leave switched on.

``torch.no_grad()`` and its like restore the mode of before when their block ends, also with an error. But a signal that
arrived while the thread was in native code is handled at the next line of Python, and where the native call failed that
is the first line of the clean-up itself: KeyboardInterrupt then takes its place. Outside cells no block is open, so what
held when the run began holds again after a run that was cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_autograd: Any = torch._C._autograd
_native: Any = torch._C
_DEVICES = ("cpu", "cuda")


class ThreadModes:
    """The modes of this thread at the time of making."""

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._autocast = [torch.is_autocast_enabled(device) for device in _DEVICES]
        self._function_modes = _native._len_torch_function_stack()
        self._dispatch_modes = _native._len_torch_dispatch_stack()
        self._hooks = _autograd._top_saved_tensors_default_hooks(True)

    def restore(self) -> None:
        """Bring them back in this thread."""
        # First the modes that would look at the calls below.
        _pop(lambda: _native._len_torch_function_stack() > self._function_modes, _native._pop_torch_function_stack)
        _pop(lambda: _native._len_torch_dispatch_stack() > self._dispatch_modes, lambda: _native._pop_torch_dispatch_stack(None))
        torch.set_grad_enabled(self._gradients)
        for device, enabled in zip(_DEVICES, self._autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
        torch.clear_autocast_cache()
        if self._hooks is None:
            _pop(lambda: _autograd._top_saved_tensors_default_hooks(True) is not None, _autograd._pop_saved_tensors_default_hooks)


def _pop(more: Callable[[], bool], pop: Callable[[], Any]) -> None:
    while more():
        pop()
