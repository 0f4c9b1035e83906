"""Work that was complete when a run was stopped is kept; the notes name ranks and parameters whose work may be incomplete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit import RankFailedError, RunInterrupted, RunTimeoutError, WorkerPool
from labkit.errors import RunReport
from tests.process.interrupts import interrupt_when, signs_of

MODELS = """
import pathlib, time, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

def fsdp2():
    model = net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model

mesh = init_device_mesh(device.type, (world_size,))
make = {
    "FSDP2": fsdp2,
    "FSDP1": lambda: FullyShardedDataParallel(net(), device_id=device, use_orig_params=True),
    "DDP": lambda: DistributedDataParallel(net()),
    "DDP with views": lambda: DistributedDataParallel(net(), gradient_as_bucket_view=True),
}
x = torch.ones(2, 4, device=device) * (rank + 1)

def gradients():
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

def alike(first, second):
    local = lambda tensor: tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return len(first) == len(second) > 0 and all(torch.equal(local(a), local(b)) for a, b in zip(first, second))
"""
KINDS = ("FSDP2", "FSDP1", "DDP", "DDP with views")
BACKWARD = "model(x).pow(2).sum().backward()\nbefore = gradients()\n"
STAY = "pathlib.Path({signs!r}, str(rank)).touch()\ntime.sleep(1000)"


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        pool.run_cell(MODELS, timeout_s=60)
        yield pool


@pytest.fixture
def pool(shared: WorkerPool, request: pytest.FixtureRequest) -> WorkerPool:
    """A pool with a model of the test's kind, or under DDP, that has taken a step, and no other model that looks like it."""
    kind = getattr(request, "param", "DDP")
    shared.run_cell(
        f"import gc; model = None; gc.collect()\nmodel = make[{kind!r}]()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "model(x).sum().backward()\noptimizer.step()\noptimizer.zero_grad()",
        timeout_s=60,
    )
    return shared


def value(pool: WorkerPool, expression: str) -> dict[int, Any]:
    results = pool.run_cell(expression, want_value=True, timeout_s=60)
    assert results is not None
    return dict(results)


def stopped_in_its_sleep(pool: WorkerPool, cell: str, signs: Path) -> RunReport:
    return interrupt_when(pool, signs_of(signs, 2), lambda: pool.run_cell(cell + STAY.format(signs=str(signs)))).error


def train_on(pool: WorkerPool) -> None:
    pool.run_cell(
        "optimizer.step()\noptimizer.zero_grad()\nmodel(x).sum().backward()\noptimizer.step()\ndist.barrier()", timeout_s=60
    )


@pytest.mark.parametrize("pool", KINDS, indirect=True)
def test_p6_gradients_of_a_finished_backward_outlive_a_stop(pool: WorkerPool, tmp_path: Path) -> None:
    error = stopped_in_its_sleep(pool, BACKWARD, tmp_path)
    assert isinstance(error, RunInterrupted)
    assert not any("dropped" in note for note in error.notes)
    assert any("gradients are complete and kept. zero_grad() clears them" in note for note in error.notes)
    assert value(pool, "alike(before, gradients())") == {0: True, 1: True}
    train_on(pool)


@pytest.mark.parametrize("pool", KINDS, indirect=True)
def test_p6_gradients_that_a_gpu_may_not_have_computed_are_dropped(pool: WorkerPool, request: pytest.FixtureRequest) -> None:
    """A backward that has returned on a GPU is only queued; collectives that were cut may be in front of it."""
    pretend = "from labkit.worker.mend import recovery\nrecovery._queues_work = lambda: {}\noptimizer.zero_grad()"
    request.addfinalizer(lambda: pool.run_cell(pretend.format(False)))
    for on_gpu in (False, True):
        pool.run_cell(pretend.format(on_gpu))
        with pytest.raises(RunTimeoutError) as caught:
            pool.run_cell(BACKWARD + "if rank == 0: dist.barrier()", timeout_s=3)
        assert any("dropped" in note for note in caught.value.notes) == on_gpu
        assert value(pool, "bool(gradients())") == dict.fromkeys(range(2), not on_gpu)


@pytest.mark.parametrize("pool", KINDS, indirect=True)
def test_p6_gradients_outlive_a_rank_that_raises_while_others_wait(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell(f"{BACKWARD}if rank == 1:\n    raise ValueError('planted')\ndist.barrier()", timeout_s=60)
    assert any("rebuilt the process groups" in note for note in caught.value.notes)
    assert not any("dropped" in note for note in caught.value.notes)
    assert value(pool, "alike(before, gradients())") == {0: True, 1: True}
    train_on(pool)


@pytest.mark.parametrize("pool", KINDS, indirect=True)
def test_p6_gradients_that_only_one_rank_has_complete_are_dropped_on_both(pool: WorkerPool) -> None:
    """The other rank's backward is cut after the model's last collective, or in one, so it does not have all gradients."""
    cell = """
def fail(gradient):
    raise ValueError("planted")
inputs = x.clone().requires_grad_()
if rank == 1:
    inputs.register_hook(fail)
model(inputs).sum().backward()
dist.barrier()
"""
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell(cell, timeout_s=60)
    assert any("dropped" in note for note in caught.value.notes)
    assert value(pool, "len(gradients())") == {0: 0, 1: 0}
    pool.run_cell("model(x).sum().backward()", timeout_s=60)
    train_on(pool)


@pytest.mark.parametrize("pool", KINDS, indirect=True)
def test_p6_gradients_that_one_rank_has_cleared_are_dropped_on_both(pool: WorkerPool, tmp_path: Path) -> None:
    error = stopped_in_its_sleep(pool, f"{BACKWARD}if rank == 0:\n    optimizer.zero_grad()\n", tmp_path)
    assert any(note.startswith("Gradients that only some ranks still had are dropped") for note in error.notes)
    assert value(pool, "len(gradients())") == {0: 0, 1: 0}


CUT = "\nif rank == 1:\n    time.sleep(1000)\nmodel(x).sum().backward()"


def test_p7_parameters_are_called_those_of_the_last_step_where_a_step_was_seen(pool: WorkerPool) -> None:
    step = "model(x).sum().backward()\noptimizer.step()"
    for before, known in ((step, True), ("", False)):
        with pytest.raises(RunTimeoutError) as caught:
            pool.run_cell(before + CUT, timeout_s=1.0)
        [note] = [note for note in caught.value.notes if "dropped" in note]
        assert ("parameters are as the last completed step left them" in note) == known
        assert ("completed no step on all ranks" in note) != known


UPDATE = """
model(x).sum().backward()
with torch.no_grad():
    for number, parameter in enumerate(model.parameters()):
        if rank == 1 and number == 3:
            raise ValueError("planted")
        parameter -= 0.1 * parameter.grad
dist.barrier()
"""


@pytest.mark.parametrize(("pool", "says"), [("DDP", "differ"), ("FSDP2", "may differ")], indirect=["pool"])
def test_p7_an_update_by_hand_that_one_rank_did_half_names_the_parameters(pool: WorkerPool, says: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell(UPDATE, timeout_s=60)
    [note] = [note for note in caught.value.notes if "parameters of" in note]
    kind = "DDP" if says == "differ" else "FSDP2"
    assert note.startswith(f"3 of 6 parameters of model ({kind}) {says} between rank 0 and rank 1: 1.bias, 2.weight, 2.bias.")
    assert not any("last completed step" in note for note in caught.value.notes)


HANDLERS = {
    "a barrier": "dist.barrier()",
    "a checkpoint": "dcp.save({{'model': model.state_dict()}}, checkpoint_id={folder!r})",
    "more time than a stop gives": "time.sleep(1000)",
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_p8_handler_that_needs_collectives_or_time_is_named_when_it_fails(pool: WorkerPool, handler: str, tmp_path: Path) -> None:
    save = HANDLERS[handler].format(folder=str(tmp_path / "saved"))
    for attempt in range(5):
        signs = tmp_path / str(attempt)
        signs.mkdir()
        cell = f"""entered = False
try:
    pathlib.Path({str(signs)!r}, str(rank)).touch()
    while True:
        dist.all_reduce(torch.ones(4))
except KeyboardInterrupt:
    entered = True
    time.sleep(0.6)
    {save}"""
        error = interrupt_when(pool, signs_of(signs, 2), lambda cell=cell: pool.run_cell(cell, cell_number=4)).error
        assert isinstance(error, RunInterrupted)
        # A freed collective raises RuntimeError; if the signal follows it closely, no handler runs.
        if any(value(pool, "entered").values()):
            break
    [note] = [note for note in error.notes if "own code for the interrupt" in note]
    assert "the cell's own code for the interrupt at Cell In[4], line 9 failed" in note
    assert "belongs in a cell of its own" in note
    if "sleep" not in save:
        pool.run_cell(save, timeout_s=60)
