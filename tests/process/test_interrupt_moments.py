"""Interrupts at bad moments: anywhere in a training loop, while ranks are being repaired, while objects are being made."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit import RunInterrupted, WorkerPool
from labkit.controller.run.repair import Repair
from tests.process import interrupt_scenarios as scenarios
from tests.process.interrupts import ARRIVES_WITHIN_S, ENDS_WITHIN_S, interrupt_when, signs_of


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cpu", replace=True) as shared:
        yield shared


def value(pool: WorkerPool, expression: str) -> dict[int, Any]:
    results = pool.run_cell(expression, want_value=True, timeout_s=60)
    assert results is not None
    return dict(results)


def works(pool: WorkerPool) -> bool:
    total = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"
    return value(pool, total) == {0: 2.0, 1: 2.0}


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_training_loop_that_is_interrupted_anywhere_has_taken_whole_steps(pool: WorkerPool, kind: scenarios.Kind) -> None:
    """However the ranks are spread over a step at that moment, they end up after the same step, as if never interrupted."""
    moments = random.Random(5)
    pool.run(scenarios.make, "cut", kind, pool.device)
    for _ in range(6):
        at = time.monotonic() + moments.uniform(0.2, 0.5)
        interrupted = interrupt_when(pool, lambda at=at: time.monotonic() > at, lambda: pool.run(scenarios.train, "cut", 10**6))
        assert isinstance(interrupted.error, RunInterrupted)
        assert not any("step()" in note for note in interrupted.error.notes)
        pool.run(scenarios.clear_gradients, "cut")  # they are kept if the stop fell between a backward and its zero_grad()
    steps = pool.run(scenarios.steps_taken, "cut").same()
    assert steps > 6
    pool.run(scenarios.make, "undisturbed", kind, pool.device)
    pool.run(scenarios.train, "undisturbed", steps, timeout_s=ARRIVES_WITHIN_S)
    pool.run(scenarios.forget_losses, ["cut", "undisturbed"])
    pool.run(scenarios.save, "undisturbed")
    for comparison in pool.run(scenarios.compare, "cut", "undisturbed").values():
        assert comparison.num_values > 2000
        assert comparison.num_different == comparison.gradients == 0


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02])
def test_an_interrupt_while_the_ranks_are_being_mended_does_no_harm(
    pool: WorkerPool, after_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An impatient user presses Ctrl-C again after the first one has already worked."""
    rebuild, pressed = Repair._rebuild, []

    def disturbed(repair: Repair, *args: Any) -> Any:
        if not pressed:
            pressed.append(threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)))
            pressed[0].start()
        return rebuild(repair, *args)

    monkeypatch.setattr(Repair, "_rebuild", disturbed)
    # labkit installs its own handler while it waits, and then restores this one.
    previous = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        interrupted = interrupt_when(
            pool, signs_of(tmp_path, 1), lambda: pool.run(scenarios.wait, "all_reduce", [1], pool.device, str(tmp_path))
        )
        pressed[0].join()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert any("rebuilt the process groups" in note for note in interrupted.error.notes)
    assert pool.dead_ranks == ()
    assert works(pool)


def test_an_interrupted_checkpoint_can_be_written_again(pool: WorkerPool, tmp_path: Path) -> None:
    signs = tmp_path / "signs"
    signs.mkdir()
    pool.run_cell(f"""
import pathlib, time, torch, torch.distributed.checkpoint as dcp
class Slow(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        pathlib.Path({str(signs)!r}, str(rank)).touch()
        if rank == 1 and slow:
            time.sleep(1000)
        return super().state_dict(*args, **kwargs)
module, slow = Slow(2, 2), True
""")
    save = f"dcp.save({{'module': module}}, checkpoint_id={str(tmp_path / 'saved')!r})"
    error = interrupt_when(pool, signs_of(signs, 2), lambda: pool.run_cell(save)).error
    assert error.interrupted_ranks == (0, 1)
    pool.run_cell(f"slow = False\n{save}", timeout_s=60)
    assert (tmp_path / "saved" / ".metadata").exists()
    assert works(pool)


class ArrivesSlowly:
    """An object that takes for ever to unpickle on a rank."""

    def __init__(self, signs: str) -> None:
        self.signs = signs

    def __reduce__(self) -> tuple[Any, ...]:
        return scenarios._stay, (self.signs,)


def test_an_interrupted_push_leaves_the_old_values(pool: WorkerPool, tmp_path: Path) -> None:
    pool.push(pushed="old")
    error = interrupt_when(pool, signs_of(tmp_path, 2), lambda: pool.push(pushed=ArrivesSlowly(str(tmp_path)))).error
    assert error.interrupted_ranks == (0, 1)
    assert dict(pool.pull("pushed")) == {0: "old", 1: "old"}
    assert works(pool)


def test_a_model_whose_making_was_interrupted_can_be_made_again(pool: WorkerPool, tmp_path: Path) -> None:
    make = f"""
import pathlib, time, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
half_made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
fully_shard(half_made[0], mesh=mesh)
if {{stay}} and rank == 1:
    pathlib.Path({str(tmp_path)!r}, str(rank)).touch()
    time.sleep(1000)
init_device_mesh(device.type, (1, 2), mesh_dim_names=("replicate", "shard"))
fully_shard(half_made, mesh=mesh)
half_made(torch.ones(2, 4, device=device)).sum().backward()
"""
    error = interrupt_when(pool, signs_of(tmp_path, 1), lambda: pool.run_cell(make.format(stay=True))).error
    assert error.interrupted_ranks == (0, 1)
    pool.run_cell(make.format(stay=False), timeout_s=60)
    assert works(pool)


def test_twenty_interrupts_in_a_row_leave_two_threads_each_and_no_descriptors(pool: WorkerPool, tmp_path: Path) -> None:
    def holdings() -> dict[int, tuple[int, int]]:
        count = "import gc, os\ngc.collect()\n(len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')))"
        return value(pool, count)

    def interrupt(name: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        arrived = signs_of(folder, 1)
        interrupted = interrupt_when(pool, arrived, lambda: pool.run(scenarios.wait, "all_reduce", [0], pool.device, str(folder)))
        assert interrupted.took_s < ENDS_WITHIN_S

    interrupt("first")  # makes the transport that all later groups share
    before = holdings()
    for i in range(20):
        interrupt(str(i))
    groups = len(
        value(pool, "from labkit.worker.groups import backends\n[backends.group_name(group) for group in backends.groups()]")[0]
    )
    for rank, (threads, descriptors) in holdings().items():
        assert threads <= before[rank][0] + 20 * 2 * groups
        assert descriptors <= before[rank][1] + 2
    assert works(pool)
