"""A plan is made in a process of its own: the caller is unchanged, and the process ends with it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import labkit
from labkit.plan import TrainingJob, make_plan
from labkit.plan.process import PlanningFailedError

DEADLINE_S = 60


def model() -> nn.Module:
    print("building")  # must not appear in the answer
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def summed(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return module(batch).sum()  # type: ignore[no-any-return]


def ends() -> nn.Module:
    import os

    os.write(2, b"the last words\n")
    os._exit(7)


def job(build: Callable[[], nn.Module]) -> TrainingJob:
    return TrainingJob(build, "dp=64", batch=(2, 4), batch_dtype="float32", loss=summed, blocks=("Linear",))


def test_plan_made_on_a_rank_leaves_its_process_group_alone(pool: labkit.WorkerPool) -> None:
    def plan_on_rank_0() -> float:
        one = torch.ones(1)
        dist.all_reduce(one)
        if dist.get_rank() == 0:
            assert make_plan(job(model), timeout_s=DEADLINE_S).world_size == 64
        dist.all_reduce(one)
        return float(one)

    assert pool.run(plan_on_rank_0, timeout_s=DEADLINE_S + 20).same() == 4.0


def test_process_that_ends_without_a_plan_is_told_with_its_last_words() -> None:
    with pytest.raises(PlanningFailedError, match=r"exit code 7(.|\n)*the last words"):
        make_plan(job(ends), timeout_s=DEADLINE_S)


def test_plan_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TimeoutError, match=r"planning did not end within 0\.2 s"):
        make_plan(job(model), timeout_s=0.2)
    assert not [child for child in psutil.Process().children() if "labkit.plan.child" in child.cmdline()]


def test_planning_process_ends_when_its_caller_is_killed() -> None:
    program = "import time; from labkit.plan import TrainingJob, make_plan\nmake_plan(TrainingJob(lambda: time.sleep(600), 'dp=2'))"
    caller = subprocess.Popen([sys.executable, "-c", program])
    try:
        (child,) = _until(lambda: psutil.Process(caller.pid).children())
    finally:
        caller.kill()
        caller.wait()
    _until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def _until(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found
