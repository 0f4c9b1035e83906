"""A collective that a successful run has left open is reported at its end, and is not matched with the next collective."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from labkit import WorkerPool
from labkit.errors import OpenCollectiveError

TOTAL = """
u, v = torch.full((3,), 10.), torch.ones(1)
dist.all_reduce(u)
dist.all_reduce(v, group=pair)
(kept, float(u[0]), float(v))
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        pool.run_cell(
            "import threading, time, torch, torch.distributed as dist\nkept = rank * 10\npair = dist.new_group([0, 1])\n"
            "linear = torch.nn.Linear(2, 2)\nmodel = torch.nn.parallel.DistributedDataParallel(linear)"
        )
        yield pool


@pytest.fixture
def pool(shared: WorkerPool) -> Iterator[WorkerPool]:
    """A pool whose ranks compute the right sums after the test, with their variables."""
    before = shared.pids
    yield shared
    results = shared.run_cell(TOTAL, want_value=True, timeout_s=60)
    assert results is not None
    assert dict(results) == {0: (0, 20.0, 2.0), 1: (10, 20.0, 2.0)}
    assert shared.pids == before


OPEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "one rank begins it": (
        "t = torch.ones(3)\nif rank == 0:\n    w = dist.all_reduce(t, async_op=True)",
        {},
        r"rank 0 has begun all_reduce #\d+ of the default group, rank 1 has not\.",
    ),
    "a cell on one rank begins it": (
        "t = torch.ones(3)\nw = dist.all_reduce(t, async_op=True)",
        {"ranks": 1},
        r"rank 1 has begun all_reduce #\d+ of the default group, rank 0 has not\.",
    ),
    "one rank begins one more": (
        "t = torch.ones(3)\nws = [dist.all_reduce(t, async_op=True) for _ in range(2 + rank)]",
        {},
        r"rank 1 has begun all_reduce #\d+ of the default group, rank 0 has not\.",
    ),
    "in another group": (
        "t = torch.ones(3)\nif rank == 1:\n    w = dist.broadcast(t, 0, group=pair, async_op=True)",
        {},
        r"rank 1 has begun broadcast #\d+ of the group of ranks 0-1, rank 0 has not\.",
    ),
    "behind messages, of which each rank has its own number": (
        "t = torch.ones(3)\nif rank == 0:\n    dist.send(t, 1)\n    dist.send(t, 1)\n    w = dist.all_reduce(t, async_op=True)\n"
        "else:\n    dist.recv(t, 0)\n    dist.recv(t, 0)",
        {},
        r"rank 0 has begun all_reduce #\d+ of the default group, rank 1 has not\.",
    ),
}


@pytest.mark.parametrize("way", OPEN)
@pytest.mark.filterwarnings("ignore")
def test_c2_collective_that_not_all_ranks_have_begun_is_told_at_the_end_and_given_up(pool: WorkerPool, way: str) -> None:
    cell, options, told = OPEN[way]
    with pytest.raises(OpenCollectiveError) as caught:
        pool.run_cell(cell, timeout_s=60, **options)
    assert re.search(told, str(caught.value))
    assert "rebuilt the process groups" in str(caught.value)
    assert caught.value.failures == ()


def test_c2_a_run_that_ends_well_loses_no_gradient_to_it(pool: WorkerPool) -> None:
    with pytest.raises(OpenCollectiveError) as caught:
        pool.run_cell(
            "model(torch.ones(1, 2)).sum().backward()\nif rank == 0:\n    w = dist.all_reduce(torch.ones(3), async_op=True)",
            timeout_s=60,
        )
    assert not any("dropped" in note or "random" in note for note in caught.value.notes)
    assert pool.run_cell("linear.weight.grad is not None", want_value=True) == {0: True, 1: True}


EVEN = {
    "all ranks begin it": "w = dist.all_reduce(torch.ones(3), async_op=True)",
    "messages only": "if rank == 0:\n    dist.send(torch.ones(3), 1)\nelse:\n    dist.recv(torch.ones(3), 0)",
    "messages, then a collective": "for _ in range(2):\n    if rank == 0:\n        dist.isend(torch.ones(3), 1).wait()\n"
    "    else:\n        dist.irecv(torch.ones(3), 0).wait()\ndist.barrier()",
    "a new group and a collective in it": "g = dist.new_group([0, 1])\ndist.barrier(g)\ndist.destroy_process_group(g)",
    "a group of one rank": "g = dist.new_group([0])\nif rank == 0:\n    dist.barrier(g)",
}


@pytest.mark.parametrize("way", EVEN)
def test_c2_runs_in_which_every_rank_made_the_same_calls_end_well(
    pool: WorkerPool, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run_cell(EVEN[way], timeout_s=60)
    pool.run_cell("dist.barrier()", timeout_s=60)
    assert "process groups" not in capsys.readouterr().err


def test_c2_thread_that_may_still_begin_it_is_waited_for(pool: WorkerPool) -> None:
    """Rank 1 begins its part in a thread of its own, after the end of the cell in which rank 0 began it."""
    cell = """
go, t = threading.Event(), torch.ones(3)
def late():
    while not go.is_set():
        time.sleep(0.001)
    dist.all_reduce(t)
if rank == 1:
    thread = threading.Thread(target=late)
    thread.start()
else:
    w = dist.all_reduce(t, async_op=True)
"""
    pool.run_cell(cell, timeout_s=60)
    pool.run_cell("go.set()\nw.wait() if rank == 0 else thread.join()", timeout_s=60)
    assert pool.run_cell("float(t[0])", want_value=True) == {0: 2.0, 1: 2.0}


def test_p19_different_numbers_of_groups_are_told_at_the_end_and_the_next_group_works(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run_cell("if rank == 0:\n    alone = dist.new_group([0])", timeout_s=60)
    told = capsys.readouterr().err
    assert "The ranks have made different numbers of process groups: rank 0 1 more than rank 1." in told
    assert "Every rank has to call dist.new_group for every group" in told
    both = "both = dist.new_group([0, 1])\nones = torch.ones(1)\ndist.all_reduce(ones, group=both)\nfloat(ones)"
    assert pool.run_cell(both, want_value=True, timeout_s=60) == {0: 2.0, 1: 2.0}
    assert "process groups" not in capsys.readouterr().err
