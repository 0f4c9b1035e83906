"""The modes that torch keeps for the main thread, which an interrupt can leave switched on.

``torch.no_grad()`` and similar blocks restore the earlier mode when they end, also after an error. But a signal that arrives while
the thread is in native code is handled at the next line of Python. If the native call failed, that line is the first one of the
clean-up itself, and KeyboardInterrupt replaces it. Outside cells no such block is open, so after a run that was cut off the modes
from the beginning of the run are restored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_autograd: Any = torch._C._autograd
_native: Any = torch._C
_DEVICES = ("cpu", "cuda")


class ThreadModes:
    """The modes of this thread when the object is made."""

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._autocast = [torch.is_autocast_enabled(device) for device in _DEVICES]
        self._function_modes = _native._len_torch_function_stack()
        self._dispatch_modes = _native._len_torch_dispatch_stack()
        self._hooks = _autograd._top_saved_tensors_default_hooks(True)

    def restore(self) -> None:
        """Restore the modes in this thread."""
        # First remove the modes that would intercept the calls below.
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
