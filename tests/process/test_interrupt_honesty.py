"""The run's notes name objects that an interrupt has broken for good; using one raises instead of going wrong or waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit import RankFailedError, RunInterrupted, RunTimeoutError, WorkerPool
from labkit.errors import RunReport
from tests.process.interrupts import ENDS_WITHIN_S, interrupt_when, signs_of

TRAINING = """
import pathlib, time, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x = torch.ones(2, 4, device=device)
def backward():
    model(x).pow(2).mean().backward()
def step():
    backward()
    optimizer.step()
    optimizer.zero_grad()
step()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        yield pool


@pytest.fixture
def pool(shared: WorkerPool) -> WorkerPool:
    """A pool with a sharded model that has taken one step."""
    shared.run_cell(TRAINING, timeout_s=60)
    return shared


def stopped(pool: WorkerPool, cell: str) -> RunReport:
    """Run a cell that does not succeed on all ranks."""
    with pytest.raises(RunReport) as caught:
        pool.run_cell(cell, timeout_s=60)
    return caught.value


def value(pool: WorkerPool, expression: str) -> dict[int, Any]:
    results = pool.run_cell(expression, want_value=True, timeout_s=60)
    assert results is not None
    return dict(results)


# ---- optimizers ------------------------------------------------------------------------------------------------------

HALF_STEP = """
backward()
if rank == 1:  # its step fails at the last of four parameters, when three have been updated
    optimizer.param_groups[0]["foreach"] = False
    optimizer.state[model[1].bias]["exp_avg"] = None
optimizer.step()
dist.barrier()
"""


def test_half_an_optimizer_step_is_named_and_no_rank_takes_another_one(pool: WorkerPool) -> None:
    error = stopped(pool, HALF_STEP)
    assert error.failed_ranks == (1,)
    [note] = [note for note in error.notes if "optimizer" in note]
    assert note.startswith("Rank 1 stopped inside step() of optimizer (Adam, for model), which is half applied there.")
    refused = stopped(pool, "step()")
    assert refused.failed_ranks == (0, 1)
    for failure in refused.failures:
        assert failure.type_name == "RuntimeError"
        assert failure.message.startswith("step() of optimizer (Adam, for model) is refused")
        assert "Rank 1 stopped inside step()" in failure.message
        assert "checkpoint" in failure.message
        assert "pool.restart()" in failure.message


@pytest.mark.parametrize("load", ["optimizer.load_state_dict(whole)", "set_optimizer_state_dict(model, optimizer, sharded)"])
def test_a_loaded_state_lifts_the_refusal(pool: WorkerPool, load: str) -> None:
    pool.run_cell("""
import copy
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
whole = copy.deepcopy(optimizer.state_dict())
sharded = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
""")
    stopped(pool, HALF_STEP)
    assert stopped(pool, "step()").failed_ranks == (0, 1)
    pool.run_cell(load, timeout_s=60)
    pool.run_cell("step()", timeout_s=60)


def test_a_step_that_one_rank_took_and_the_other_did_not_is_named_and_refused(pool: WorkerPool) -> None:
    error = stopped(pool, "step()\nbackward()\nif rank == 1:\n    raise ValueError('before its step')\noptimizer.step()\nmodel(x)")
    [note] = [note for note in error.notes if "optimizer" in note]
    assert note.startswith("Steps of optimizer (Adam, for model) completed in this run: 2 on rank 0, 1 on rank 1.")
    assert "is refused" in stopped(pool, "step()").failures[0].message


def test_a_first_step_that_only_one_rank_took_is_refused_on_both(pool: WorkerPool) -> None:
    pool.run_cell("fresh = torch.optim.Adam(model.parameters())")
    error = stopped(pool, "backward()\nif rank == 1:\n    raise ValueError('before its step')\nfresh.step()\nmodel(x)")
    assert any("fresh (Adam, for model) completed in this run: 1 on rank 0, 0 on rank 1" in note for note in error.notes)
    assert stopped(pool, "backward()\nfresh.step()").failed_ranks == (0, 1)


def test_local_models_may_take_as_many_steps_as_they_like(pool: WorkerPool) -> None:
    local = "local = torch.nn.Linear(2, 2)\nsgd = torch.optim.SGD(local.parameters(), lr=0.1)\n"
    train = "for _ in range(rank + 1):\n    local(torch.ones(1, 2)).sum().backward()\n    sgd.step()\n"
    error = stopped(pool, local + train + "if rank == 0:\n    dist.barrier()\nraise ValueError('enough')")
    assert not any("sgd" in note for note in error.notes)
    pool.run_cell(train + "step()", timeout_s=60)


def test_an_interrupt_waits_for_the_step_to_end(pool: WorkerPool, tmp_path: Path) -> None:
    """The step sleeps; the signal that comes meanwhile is delivered when it has updated everything."""
    pool.run_cell(f"""
signs = pathlib.Path({str(tmp_path)!r})
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        (signs / str(rank)).touch()
        time.sleep(0.5)
        super().step(closure)
        global applied
        applied = True
applied = False
slow = Slow(model.parameters(), lr=0.1)
""")
    interrupted = interrupt_when(
        pool, signs_of(tmp_path, 2), lambda: pool.run_cell("backward()\nslow.step()\ntime.sleep(1000)", timeout_s=60)
    )
    assert isinstance(interrupted.error, RunInterrupted)
    assert interrupted.took_s < ENDS_WITHIN_S
    assert not [note for note in interrupted.error.notes if "slow" in note]
    assert value(pool, "applied") == {0: True, 1: True}
    pool.run_cell("step()", timeout_s=60)


def test_a_step_that_does_not_end_is_cut_and_named(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run_cell(f"""
signs = pathlib.Path({str(tmp_path)!r})
class Endless(torch.optim.SGD):
    def step(self, closure=None):
        (signs / str(rank)).touch()
        time.sleep(1000)
endless = Endless(model.parameters(), lr=0.1)
""")
    interrupted = interrupt_when(pool, signs_of(tmp_path, 2), lambda: pool.run_cell("backward()\nendless.step()", timeout_s=60))
    assert interrupted.took_s < ENDS_WITHIN_S
    assert any("Ranks 0-1 stopped inside step() of endless" in note for note in interrupted.error.notes)
    assert "is refused" in stopped(pool, "endless.step()").failures[0].message


def test_an_interrupted_closure_is_no_half_step(pool: WorkerPool, tmp_path: Path) -> None:
    cell = f"""
def closure():
    backward()
    pathlib.Path({str(tmp_path)!r}, str(rank)).touch()
    time.sleep(1000)
optimizer.step(closure)
"""
    interrupted = interrupt_when(pool, signs_of(tmp_path, 2), lambda: pool.run_cell(cell, timeout_s=60))
    assert not any("step()" in note for note in interrupted.error.notes)
    pool.run_cell("step()", timeout_s=60)


def test_learning_rates_that_came_to_differ_are_named(pool: WorkerPool) -> None:
    error = stopped(pool, "step()\nif rank == 0:\n    optimizer.param_groups[0]['lr'] = 0.05\n    model(x)\nraise ValueError")
    assert any(
        "learning rates of optimizer (Adam, for model) differ now (rank 0: 0.05; rank 1: 0.1)" in note for note in error.notes
    )


def test_gradient_synchronization_that_is_off_on_one_rank_is_named(pool: WorkerPool) -> None:
    error = stopped(pool, "if rank == 0:\n    model.set_requires_gradient_sync(False)\n    model(x)\nraise ValueError")
    assert any("switched off on rank 0 only" in note for note in error.notes)


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_an_interrupt_between_forward_and_backward_leaves_both_alone(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run_cell("loss = model(x).pow(2).mean()", timeout_s=60)
    sleep = f"pathlib.Path({str(tmp_path)!r}, str(rank)).touch()\ntime.sleep(1000)"
    error = interrupt_when(pool, signs_of(tmp_path, 2), lambda: pool.run_cell(sleep)).error
    assert not any("dropped" in note for note in error.notes)
    pool.run_cell("loss.backward()", timeout_s=60)
    sums = value(pool, "float(model[0].weight.grad.full_tensor().abs().sum())")
    assert sums[0] == sums[1] > 0


def test_gradients_survive_an_error_outside_the_iteration(pool: WorkerPool) -> None:
    stopped(pool, "backward()\nundefined_name")
    assert all(value(pool, "model[0].weight.grad is not None").values())
    pool.run_cell("optimizer.step()", timeout_s=60)


def test_an_error_in_backward_on_all_ranks_leaves_the_model_fit_for_the_next_step(pool: WorkerPool) -> None:
    expected = value(pool, "before = model[0].weight.full_tensor()\nfloat(model(x).pow(2).mean())")
    error = stopped(
        pool,
        """
def fail(gradient):
    raise ValueError("planted")
hook = model[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
try:
    backward()
finally:
    hook.remove()
""",
    )
    assert error.failed_ranks == (0, 1)
    assert any("dropped" in note for note in error.notes)
    assert value(pool, "torch.equal(before, model[0].weight.full_tensor())") == {0: True, 1: True}
    assert value(pool, "float(model(x).pow(2).mean())") == expected
    pool.run_cell("step()", timeout_s=60)


# ---- random states ---------------------------------------------------------------------------------------------------


def test_random_states_that_came_to_differ_are_named_with_the_remedy(pool: WorkerPool) -> None:
    pool.run_cell("torch.manual_seed(1)")
    error = stopped(pool, "if rank == 1:\n    torch.rand(1)\n    raise ValueError\ndist.barrier()")
    [note] = [note for note in error.notes if "random" in note]
    assert note.startswith("Rank 1 drew random numbers and the others did not")
    assert "torch.manual_seed" in note


def test_random_states_that_stay_equal_are_not_mentioned(pool: WorkerPool) -> None:
    pool.run_cell("torch.manual_seed(1)")
    error = stopped(pool, "torch.rand(1)\nif rank == 1:\n    raise ValueError\ndist.barrier()")
    assert not any("random" in note for note in error.notes)


# ---- process groups --------------------------------------------------------------------------------------------------


def test_ranks_that_wait_for_others_to_make_a_group_are_freed_and_the_next_group_works(pool: WorkerPool) -> None:
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell("if rank == 0:\n    alone = dist.new_group([0])\n    both = dist.new_group([0, 1])", timeout_s=1.0)
    assert (caught.value.interrupted_ranks, caught.value.finished) == ((0,), (1,))
    make = "both = dist.new_group([0, 1])\nones = torch.ones(1)\ndist.all_reduce(ones, group=both)\nfloat(ones)"
    assert value(pool, make) == {0: 2.0, 1: 2.0}
    pool.run_cell("dist.all_reduce(torch.ones(1), group=alone)", ranks=0, timeout_s=60)


USES = {
    "all_reduce": "dist.all_reduce(torch.ones(1), group=torn)",
    "barrier": "dist.barrier(group=torn)",
    "recv": "dist.recv(torch.ones(1), 1, group=torn)",
    "functional": "import torch.distributed._functional_collectives as funcol\nfuncol.all_reduce(torch.ones(1), 'sum', torn) + 1",
    "DTensor": "from torch.distributed.tensor import Shard, distribute_tensor\n"
    "distribute_tensor(torch.ones(4), DeviceMesh.from_group(torn, device.type), [Shard(0)], src_data_rank=None).full_tensor()",
}


def test_a_group_that_only_one_rank_has_is_named_and_using_it_raises(pool: WorkerPool) -> None:
    pool.run_cell("from torch.distributed.device_mesh import DeviceMesh\ntorn = dist.new_group([0, 1])", timeout_s=60)
    error = stopped(pool, "if rank == 1:\n    dist.destroy_process_group(torn)\n    raise ValueError\ndist.barrier()")
    [note] = [note for note in error.notes if "process group '" in note]
    assert "of ranks 0-1 exists only on rank 0" in note
    for name, use in USES.items():
        began = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            pool.run_cell(use, ranks=0, timeout_s=60)
        assert time.monotonic() - began < ENDS_WITHIN_S
        assert caught.value.failures[0].type_name == "RuntimeError", name
        assert "exists only on rank 0" in caught.value.failures[0].message, name
    pool.run_cell("again = dist.new_group([0, 1])\ndist.all_reduce(torch.ones(1), group=again)\nstep()", timeout_s=60)
