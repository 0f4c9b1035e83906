"""A gate before fused optimizer steps: a step can be queued behind unfinished gradients and has no effect if they never come.

A GPU works off a queue, so the processor could launch an optimizer's update, and the next forward, while backward still runs. But
if a collective of backward never ends, an abort frees it, and the work queued behind it runs on unfinished gradients. Launched work
cannot be taken back. But a fused kernel can be told on the device to change nothing, by the tensor with which
``torch.amp.GradScaler`` skips steps whose gradients overflowed. Here that tensor is read from host memory when the queue reaches
it: it is 0, unless labkit is about to abort.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

_POLL_S = 0.001


class _Queued(NamedTuple):
    optimizer: weakref.ref[Optimizer]
    found: Tensor
    passed: torch.cuda.Event | None


class StepGate:
    """The gate of one rank.

    Args:
        device: The device of its models. On a CPU nothing is queued, and only tests put a gate before a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flag: Tensor | None = None
        self._shut = False
        self._queued: deque[_Queued] = deque()
        self._entered: tuple[Optimizer, Tensor] | None = None

    def enter(self, optimizer: Optimizer) -> bool:
        """Put the gate before the step that is about to be launched; :meth:`leave` takes it away.

        Returns:
            False if this optimizer cannot be told to change nothing, or the gate is shut: the step has to wait for its gradients.
        """
        self.leave()
        if not _obeys(optimizer, self._device.type):
            return False
        if self._flag is None:
            self._flag = torch.zeros((), pin_memory=self._device.type == "cuda")
        num_over = next((place for place, one in enumerate(self._queued) if not _is_over(one)), len(self._queued))
        # Check `_shut` only after the flag exists (else shut() could be missed) and after counting finished steps (else some would
        # be reported as skipped).
        if self._shut:
            return False
        for _ in range(num_over):
            self._queued.popleft()
        found = torch.empty((), device=self._device).copy_(self._flag, non_blocking=True)
        passed = torch.cuda.Event() if self._device.type == "cuda" else None
        if passed is not None:
            passed.record()
        self._queued.append(_Queued(weakref.ref(optimizer), found, passed))
        optimizer.found_inf = found  # type: ignore[attr-defined]
        self._entered = optimizer, found
        return True

    def leave(self) -> None:
        """Take the gate away: the step has been launched, or has failed."""
        entered, self._entered = self._entered, None
        if entered is not None and getattr(entered[0], "found_inf", None) is entered[1]:
            del entered[0].found_inf  # type: ignore[attr-defined]

    def shut(self) -> None:
        """Let no step pass that the device has not reached yet. Called from any thread, before collectives are aborted."""
        self._shut = True
        if self._flag is not None:
            self._flag.fill_(1.0)

    def settled(self, timeout_s: float) -> bool:
        """Wait until the device has reached the last queued step. Return whether it has within the time."""
        deadline = time.monotonic() + timeout_s
        while not all(map(_is_over, self._queued)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def take_skipped(self, optimizer: Optimizer) -> int:
        """Return how many of its queued steps had no effect; each is counted once. Blocks until the device has reached them."""
        mine = [one for one in self._queued if one.optimizer() is optimizer]
        self._queued = deque(one for one in self._queued if one.optimizer() is not optimizer)
        return sum(bool(one.found) for one in mine)

    def reopen(self) -> None:
        """Open the gate again. Nothing that was queued may be left on the device."""
        self._queued.clear()
        self._shut = False
        if self._flag is not None:
            self._flag.zero_()


def _is_over(queued: _Queued) -> bool:
    return queued.passed is None or queued.passed.query()


def _obeys(optimizer: Optimizer, device_type: str) -> bool:
    """Return whether its kernels read ``found_inf`` and leave parameters, moments and step counts alone if it is 1.

    This holds for Adam and AdamW only: the first skipped step of a fused SGD with momentum would leave an uninitialized buffer.
    """
    return (
        isinstance(optimizer, Adam)
        and not hasattr(optimizer, "found_inf")  # a GradScaler steps it
        and all(group.get("fused") for group in optimizer.param_groups)
        and all(parameter.device.type == device_type for group in optimizer.param_groups for parameter in group["params"])
    )
