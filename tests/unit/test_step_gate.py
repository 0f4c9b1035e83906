"""A gated step changes nothing if the gate was shut meanwhile, and is an ordinary step otherwise.

These tests run on a CPU, where a step runs at once, so they set the flag between two steps as an abort sets it while a GPU is busy.
tests/gpu/test_step_gate.py has the race itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from labkit.worker.mend.optimizer_steps import StepRecord
from labkit.worker.mend.recovery import Recovery
from labkit.worker.steps.step_gate import StepGate

CPU = torch.device("cpu")
Make = Callable[[nn.Module], Optimizer]
OBEY: dict[str, Make] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), fused=True, lr=0.1, weight_decay=0.1),
    "AdamW with amsgrad": lambda model: torch.optim.AdamW(model.parameters(), fused=True, lr=0.1, amsgrad=True),
}
DO_NOT: dict[str, Make] = {
    "Adam, not fused": lambda model: torch.optim.Adam(model.parameters()),
    "one group not fused": lambda model: torch.optim.Adam(
        [{"params": [item], "fused": place == 0} for place, item in enumerate(model.parameters())]
    ),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters()),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def step(gate: StepGate | None, module: nn.Module, optimizer: Optimizer, *, cut: bool = False) -> None:
    """One training step; ``cut`` as if the gate were shut after the launch and before the device comes to it."""
    module(torch.ones(1, 3)).square().sum().backward()
    if gate is not None:
        assert gate.enter(optimizer)
    if cut:
        optimizer.found_inf.fill_(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    if gate is not None:
        gate.leave()
        assert not hasattr(optimizer, "found_inf")
    optimizer.zero_grad()


def values(module: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    found = [item for parameter in module.parameters() for item in (parameter, *optimizer.state[parameter].values())]
    return [(item.to_local() if isinstance(item, DTensor) else item).detach().clone() for item in found]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", OBEY.values(), ids=OBEY)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_a_skipped_step_leaves_no_trace_and_is_counted(make: Make, first: bool) -> None:
    ours, theirs = model(), model()
    gate, optimizer, reference = StepGate(CPU), make(ours), make(theirs)
    if not first:
        step(gate, ours, optimizer)
        step(None, theirs, reference)
    weights = [parameter.detach().clone() for parameter in ours.parameters()]
    step(gate, ours, optimizer, cut=True)
    assert same(weights, list(ours.parameters()))
    assert (gate.take_skipped(optimizer), gate.take_skipped(optimizer)) == (1, 0)
    gate.reopen()
    step(gate, ours, optimizer)
    step(None, theirs, reference)
    assert same(values(ours, optimizer), values(theirs, reference))
    assert gate.take_skipped(optimizer) == 0


def test_a_skipped_step_leaves_shards_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = model()
        fully_shard(ours, mesh=init_device_mesh("cpu", (1,)))
        gate, optimizer = StepGate(CPU), OBEY["Adam"](ours)
        step(gate, ours, optimizer)
        before = values(ours, optimizer)
        step(gate, ours, optimizer, cut=True)
        assert same(before, values(ours, optimizer))
        step(gate, ours, optimizer)
        assert not same(before, values(ours, optimizer))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("make", DO_NOT.values(), ids=DO_NOT)
def test_an_optimizer_that_cannot_be_told_to_do_nothing_has_to_wait(make: Make) -> None:
    optimizer = make(model())
    assert not StepGate(CPU).enter(optimizer)
    assert not hasattr(optimizer, "found_inf")


def test_a_step_of_a_gradient_scaler_has_to_wait_and_keeps_the_scaler_s_own_flag() -> None:
    optimizer = OBEY["Adam"](model())
    theirs = optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    gate = StepGate(CPU)
    assert not gate.enter(optimizer)
    gate.leave()
    assert optimizer.found_inf is theirs  # type: ignore[attr-defined]


def test_parameters_elsewhere_than_on_the_device_have_to_wait() -> None:
    assert not StepGate(torch.device("cuda", 0)).enter(OBEY["Adam"](model()))


def test_a_step_that_raises_does_not_leave_its_flag_for_the_next() -> None:
    gate, optimizer = StepGate(CPU), OBEY["Adam"](model())
    assert gate.enter(optimizer)  # and the step raises, so nobody leaves
    assert gate.enter(optimizer)
    gate.leave()
    assert not hasattr(optimizer, "found_inf")


def test_no_step_enters_a_gate_that_is_shut() -> None:
    gate, optimizer = StepGate(CPU), OBEY["Adam"](model())
    gate.shut()
    assert not gate.enter(optimizer)
    gate.reopen()
    assert gate.enter(optimizer)
    gate.leave()
    gate.shut()
    assert not gate.enter(optimizer)
    gate.reopen()
    module = model()
    again = OBEY["Adam"](module)
    before = values(module, again)
    step(gate, module, again)
    assert not same(before[:1], values(module, again)[:1])


def test_skipped_steps_are_told_again_when_the_same_run_is_mended_again() -> None:
    """As when a rank is replaced after a hang, with no run in between: otherwise the ranks' counts would seem to differ."""
    module = model()
    gate, optimizer = StepGate(CPU), OBEY["Adam"](module)
    step(gate, module, optimizer)
    step(gate, module, optimizer, cut=True)
    record = StepRecord(weakref.ref(optimizer), "Adam[2]", completed=2)
    recovery = Recovery.__new__(Recovery)
    recovery._groups, recovery._namespace = SimpleNamespace(gate=gate), {}  # type: ignore[assignment]
    first = recovery._step_condition(record, {})
    gate.reopen()
    assert (first.completed, first.skipped) == (1, 1)
    assert recovery._step_condition(record, {}) == first
