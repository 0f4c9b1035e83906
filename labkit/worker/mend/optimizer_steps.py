"""A count of the optimizer steps of a run, which shows after an interrupt whether all ranks took the same ones.

Gradients can be thrown away and parameters gathered again, but a step is an update in place: once it has begun on one rank, the
earlier parameters are gone. Two measures keep this from going unnoticed. SIGINT waits until the step is over (see
:meth:`labkit.worker.steps.run_state.RunState.hold`). And if ranks have nevertheless taken different numbers of steps, or half a
step, the optimizer refuses further steps until a checkpoint has been loaded into it.

The hooks are torch's own, for all optimizers (torch.optim.optimizer.register_optimizer_step_pre_hook, since 2.0). Each costs about
a microsecond per step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from labkit.worker.steps.run_state import RunState
from labkit.worker.steps.step_gate import StepGate

# torch.distributed.checkpoint.state_dict creates an empty optimizer's state by a step with zero gradients and zero learning rate
# before it loads into it.
_INITIALIZES = "_init_optim_state"


@dataclass(eq=False)
class StepRecord:
    """The steps of one optimizer in the present run.

    Attributes:
        optimizer: A weak reference to it.
        signature: Identifies an optimizer across ranks: class name and number of parameters per group.
        completed: Steps completed in this run, including skipped ones.
        skipped: Steps that were launched and changed nothing, as far as they are counted; see :mod:`labkit.worker.steps.step_gate`.
        under_way: Whether a step has begun to change parameters and has not ended.
    """

    optimizer: weakref.ref[Optimizer]
    signature: str
    completed: int = 0
    skipped: int = 0
    under_way: bool = False


@dataclass
class OptimizerSteps:
    """A watch on every optimizer of this process.

    Args:
        state: The state of the main thread; it holds SIGINT back during a step.
        gate: The gate before steps that need not wait for their gradients.
    """

    state: RunState
    gate: StepGate
    records: list[StepRecord] = field(default_factory=list)
    _current: weakref.WeakKeyDictionary[Optimizer, StepRecord] = field(default_factory=weakref.WeakKeyDictionary)
    _refused: weakref.WeakKeyDictionary[Optimizer, str] = field(default_factory=weakref.WeakKeyDictionary)
    _to_refuse: dict[str, str] = field(default_factory=dict)
    _outermost: FrameType | None = None  # torch's own frame around the step under way

    def install(self) -> None:
        """Begin to watch."""
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def begin_run(self) -> None:
        """Forget the steps of earlier runs."""
        self._outermost = None
        if self.records:
            self.records = []
            self._current = weakref.WeakKeyDictionary()

    def refuse(self, position: int, signature: str, reason: str) -> None:
        """Make an optimizer refuse further steps until a state has been loaded into it.

        Args:
            position: Its place in the order in which the run's optimizers took their first steps.
            signature: Its signature, by which a rank that had not reached its first step recognizes it.
            reason: The text of the error.
        """
        if position >= len(self.records):
            self._to_refuse[signature] = reason
        elif (optimizer := self.records[position].optimizer()) is not None:
            self._refuse(optimizer, reason)

    def _refuse(self, optimizer: Optimizer, reason: str) -> None:
        if optimizer not in self._refused:
            optimizer.register_load_state_dict_post_hook(self._loaded)
        self._refused[optimizer] = reason

    def _loaded(self, optimizer: Optimizer) -> None:
        self._refused.pop(optimizer, None)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller = sys._getframe(1)
        if self._outermost is not None and _is_above(self._outermost, caller):
            return None  # a step inside a step: a subclass calls its parent's, or an optimizer is inside another
        if self._refused or self._to_refuse:
            self._check(optimizer)
        self.state.board.step_begins()
        self._outermost = caller
        record = self._current.get(optimizer)
        if record is None:
            record = self._current[optimizer] = StepRecord(weakref.ref(optimizer), signature_of(optimizer))
            self.records.append(record)
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._let_begin(optimizer)
            self.state.hold()
            record.under_way = True
            return None
        wrapped = self._around(closure, record)
        return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _let_begin(self, optimizer: Optimizer) -> None:
        if _on_a_queue() and not self.gate.enter(optimizer):
            _wait_for_gradients()

    def _around(self, closure: Callable[[], Any], record: StepRecord) -> Callable[[], Any]:
        """Wrap a closure, which runs forward and backward: no parameter changes before its first call is over."""

        def evaluate() -> Any:
            if record.under_way:
                self.state.release()
            value = closure()
            _wait_for_gradients()
            self.state.hold()
            record.under_way = True
            return value

        return evaluate

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record = self._current.get(optimizer)
        if record is None or sys._getframe(1) is not self._outermost:
            return
        self._outermost = None
        self.gate.leave()
        record.completed += 1
        self.state.board.step_ends()
        if record.under_way:
            record.under_way = False
            self.state.release()

    def _check(self, optimizer: Optimizer) -> None:
        signature = signature_of(optimizer)
        if optimizer not in self._refused and signature in self._to_refuse:
            self._refuse(optimizer, self._to_refuse.pop(signature))
        reason = self._refused.get(optimizer)
        if reason is not None and not _initializes():
            raise RuntimeError(reason)


def _is_above(frame: FrameType, below: FrameType | None) -> bool:
    while below is not None and below is not frame:
        below = below.f_back
    return below is frame


def _on_a_queue() -> bool:
    """Return whether the step is launched on a GPU now, and not recorded into a graph for later."""
    return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()


def _wait_for_gradients() -> None:
    """Wait until a GPU has finished backward, before the update is launched.

    If a collective of backward never ends, an abort frees it, and the work queued behind it runs on unfinished gradients. So the
    update must not be queued before the gradients are complete. The price is the time by which the processor would have run ahead.
    """
    if _on_a_queue():
        torch.cuda.current_stream().synchronize()


for _hook in (OptimizerSteps._before, OptimizerSteps._after):
    # This is what torch.compiler.disable() sets on a function. Calling it would import the compiler, which takes a second.
    vars(_hook)["_torchdynamo_disable"] = True


def signature_of(optimizer: Optimizer) -> str:
    """Return class name and number of parameters per group, equal on all ranks that run the same program."""
    return f"{type(optimizer).__qualname__}{[len(group['params']) for group in optimizer.param_groups]}"


def parameters_of(optimizer: Optimizer) -> Iterable[Any]:
    """Return an iterator over all parameters that the optimizer updates."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _initializes() -> bool:
    frame = sys._getframe(2)
    for _ in range(12):
        if frame.f_code.co_name == _INITIALIZES:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
