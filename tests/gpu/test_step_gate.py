"""A fused optimizer's steps that were queued behind a collective that never ends change nothing, however many there are."""

from __future__ import annotations

import re

import pytest

from labkit import RankFailedError, RunTimeoutError, WorkerPool
from labkit.errors import RunReport
from tests.process import interrupt_scenarios as scenarios

KINDS: tuple[scenarios.Kind, ...] = ("fsdp2_fused", "fsdp1_fused", "ddp_fused")

# The processor does not look at a loss, so it runs ahead of the GPU as far as the GPU's queue is long.
LOOP = """
from tests.process.interrupt_scenarios import LIVE
training = LIVE["cut"]
launched = 0
for number in range(40):
    if number == 2 and rank == 1:
        {act}
    training.step()
    launched += 1
"""
SLEEP = "import time; time.sleep(1000)"
FAIL = "raise ValueError('planted')"


@pytest.mark.gpu(2)  # NCCL only: over gloo a rank waits in backward, and nothing is queued behind it
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("act", "error"), [(SLEEP, RunTimeoutError), (FAIL, RankFailedError)], ids=["stuck", "raises"])
def test_what_was_queued_behind_a_hang_changes_nothing(
    pool: WorkerPool, kind: scenarios.Kind, act: str, error: type[RunReport]
) -> None:
    for name, steps in (("reference", 2), ("cut", 0)):
        pool.run(scenarios.make, name, kind, "cuda")
        pool.run(scenarios.train, name, steps)
    pool.run(scenarios.save, "reference")
    with pytest.raises(error) as caught:
        pool.run_cell(LOOP.format(act=act), timeout_s=4)
    pool.run(scenarios.forget_losses, ["reference", "cut"])
    pool.run(scenarios.save, "reference")
    compared = pool.run(scenarios.compare, "cut", "reference")
    assert all(one.num_different == one.gradients == 0 and one.num_values > 2000 for one in compared.values()), compared
    assert pool.run(scenarios.steps_taken, "cut").same() == 2
    launched = dict(pool.pull("launched"))
    said = re.search(r"have changed nothing: (\d+) on rank 0", str(caught.value))
    # The interrupt may come between a step and the count of it.
    assert (int(said[1]) if said else 0) in (launched[0] - 2, launched[0] - 1), (launched, str(caught.value))
    print(f"\n{kind}: rank 0 had launched {launched[0]} steps, rank 1 {launched[1]}\n{caught.value}")
    # And the next steps are those of a run that nobody interrupted.
    for name in ("reference", "cut"):
        pool.run(scenarios.train, name, 2)
    pool.run(scenarios.save, "reference")
    assert all(one.num_different == 0 for one in pool.run(scenarios.compare, "cut", "reference").values())


@pytest.mark.gpu(1)
def test_what_is_queued_when_a_run_is_cut_off_changes_nothing_and_is_counted(pool: WorkerPool) -> None:
    """The queue is held up by something other than a collective, on one GPU too."""
    for name, steps in (("reference", 2), ("cut", 2)):
        pool.run(scenarios.make, name, "ddp_fused", "cuda")
        pool.run(scenarios.train, name, steps)
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell(
            "import torch\nfrom tests.process.interrupt_scenarios import LIVE\n"
            "torch.cuda._sleep(8_000_000_000)\n"  # 4 s at 2 GHz
            "launched = 0\nfor _ in range(4):\n    LIVE['cut'].step()\n    launched += 1",
            timeout_s=1,
        )
    print(f"\n{caught.value}")
    pool.run(scenarios.forget_losses, ["reference", "cut"])
    pool.run(scenarios.save, "reference")
    assert all(one.num_different == one.gradients == 0 for one in pool.run(scenarios.compare, "cut", "reference").values())
    counts = dict(pool.pull("launched"))
    for rank, launched in counts.items():
        said = re.search(rf"have changed nothing:.* (\d+) on rank {rank}", str(caught.value))
        assert said, str(caught.value)
        assert int(said[1]) in (launched, launched + 1), counts  # the interrupt may come between a step and the count of it
    for name in ("reference", "cut"):
        pool.run(scenarios.train, name, 2)
    pool.run(scenarios.save, "reference")
    assert all(one.num_different == 0 for one in pool.run(scenarios.compare, "cut", "reference").values())


@pytest.mark.gpu(1)
def test_host_memory_is_read_when_the_queue_comes_to_it_and_not_when_the_step_is_launched(pool: WorkerPool) -> None:
    """The facts about torch on which the gate depends hold."""
    found = pool.run_cell(
        "import torch\n"
        "from labkit.worker.steps.step_gate import StepGate\n"
        "parameter = torch.nn.Parameter(torch.ones(3, device=device))\n"
        "parameter.grad = torch.ones_like(parameter)\n"
        "optimizer, gate = torch.optim.Adam([parameter], fused=True), StepGate(device)\n"
        "torch.cuda._sleep(2_000_000_000)\n"
        "assert gate.enter(optimizer)\n"
        "found, busy = optimizer.found_inf, not torch.cuda.current_stream().query()\n"
        "gate.leave()\n"
        "gate.shut()\n"
        "busy, gate.settled(20), float(found), gate.take_skipped(optimizer)",
        want_value=True,
    )
    assert found is not None
    assert found.same() == (True, True, 1.0, 1)
