"""A run that hangs explains itself, names the lines, and ends on request; nothing on the ranks is lost."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from labkit import RunInterrupted, RunTimeoutError, WorkerPool
from labkit.base.limits import other_limits
from labkit.controller.hang.diagnosis import Diagnosis
from labkit.wire.messages import StreamName
from tests.process.patience import LOAD, until

SHOWN_S = 5.0 * LOAD
PREPARE = """
import ctypes, os, time, torch, torch.distributed as dist
x = torch.ones(4)
both = dist.new_group([0, 1])
kept = rank * 10
"""


class Screen:
    """Keeps what a cell shows."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.displays: list[dict[str, Any]] = []

    def text(self, name: StreamName, text: str, rank: int | None = None) -> None:
        self.texts.append(text)

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None, update: bool, rank: int | None = None
    ) -> None:
        self.displays.append(data)

    def clear(self, wait: bool) -> None: ...


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr("labkit.controller.run.runner.present_screen", lambda places: screen)
    return screen


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        yield pool


@pytest.fixture
def pool(shared: WorkerPool) -> Iterator[WorkerPool]:
    """A pool that looks at its ranks early; after each hang its ranks have their variables and work together."""
    shared.run_cell(PREPARE)
    before = shared.pids
    with other_limits(first_look_s=0.3, look_every_s=0.3):
        yield shared
    total = "ones = torch.ones(1)\ndist.all_reduce(ones)\ndist.all_reduce(ones, group=both)\n(kept, float(ones))"
    results = shared.run_cell(total, want_value=True, timeout_s=30)
    assert results is not None
    assert dict(results) == {0: (0, 4.0), 1: (10, 4.0)}
    assert shared.pids == before


def during(pool: WorkerPool, cell: str, act: Callable[[], None], **options: Any) -> BaseException | None:
    """Run a cell, act in another thread meanwhile, and then interrupt; return the cell's error."""
    failures: list[BaseException] = []

    def accompany() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)
        finally:
            pool.interrupt()

    thread = threading.Thread(target=accompany)
    thread.start()
    raised: BaseException | None = None
    try:
        pool.run_cell(cell, **options)
    except BaseException as error:
        raised = error
    finally:
        thread.join()
    if failures:
        raise failures[0]
    return raised


def seen(pool: WorkerPool, wanted: Callable[[Diagnosis], bool]) -> Diagnosis:
    """Diagnose until the diagnosis is the wanted one."""
    found: list[Diagnosis] = []

    def look() -> bool:
        found[:] = [pool.diagnose()]
        return wanted(found[0])

    until(look, "the diagnosis is the wanted one", SHOWN_S)
    return found[0]


# ---- what hangs shows why --------------------------------------------------------------------------------------------

# How many collectives came before depends on the tests before.
HANGS = {
    "case 8: missing rank": (
        "if rank == 0:\n    dist.barrier()",
        "rank 1 finished the cell; rank 0 waits in barrier #n at Cell In[1], line 2 for it.",
    ),
    "case 9: different collectives": (
        "if rank == 0:\n    dist.all_reduce(x)\nelse:\n    dist.broadcast(x, src=0)",
        "The ranks called different collectives: rank 0 in all_reduce #n at Cell In[1], line 2; "
        "rank 1 in broadcast #n at Cell In[1], line 4.",
    ),
    "different order": (
        "calls = [lambda: dist.all_reduce(x), dist.barrier]\nfor call in calls if rank == 0 else calls[::-1]:\n    call()",
        "The ranks called different collectives: rank 0 in all_reduce #n at Cell In[1], line 1; "
        "rank 1 in barrier #n at Cell In[1], line 3.",
    ),
    "one call more": (
        "if rank == 0:\n    dist.barrier()\ndist.barrier()",
        "rank 1 finished the cell; rank 0 waits in barrier #n at Cell In[1], line 3 for it.",
    ),
    "case 9: different shapes": (
        "dist.all_reduce(torch.ones(3 + rank))",
        "The ranks called all_reduce #n with different shapes: rank 0 sent [3] and went on, rank 1 sent [4].",
    ),
    "different groups": (
        "dist.barrier(both if rank == 0 else None)",
        "The ranks wait in different process groups: rank 0 in barrier #n of a group of ranks 0-1 at "
        "Cell In[1], line 1; rank 1 in barrier #n of the default group at Cell In[1], line 1.",
    ),
    "message never sent": (
        "if rank == 0:\n    dist.recv(x, src=1)",
        "rank 1 finished the cell; rank 0 waits in recv at Cell In[1], line 2 for it.",
    ),
    "group made by one rank only": (
        "if rank == 0:\n    dist.new_group([0, 1])",
        "rank 1 finished the cell; rank 0 waits in new_group at Cell In[1], line 2 for it.",
    ),
}


@pytest.mark.parametrize("hang", HANGS)
def test_hang_shows_its_cause_by_itself(pool: WorkerPool, screen: Screen, hang: str) -> None:
    cell, verdict = HANGS[hang]
    raised = during(pool, cell, lambda: until(lambda: screen.displays, "the hang is shown", SHOWN_S), cell_number=1)
    assert isinstance(raised, RunInterrupted)
    (shown,) = screen.displays
    first_line = shown["text/plain"].splitlines()[0]
    assert re.sub(r"#\d+", "#n", first_line) == verdict
    assert shown["text/html"].count("<tr>") == 3
    assert raised.diagnosis == first_line
    assert first_line in str(raised)


def test_subset_is_warned_before_it_waits_for_the_others(pool: WorkerPool, screen: Screen) -> None:
    raised = during(
        pool, "dist.all_reduce(x)", lambda: until(lambda: screen.displays, "the hang is shown", SHOWN_S), ranks=0, cell_number=3
    )
    assert isinstance(raised, RunInterrupted)
    assert "PartialRunWarning: this cell runs on" in screen.texts[0]
    assert "calls all_reduce on a group" in screen.texts[0]
    assert "rank 1 is not part of this run; rank 0 waits in all_reduce" in screen.displays[0]["text/plain"]


def test_hang_that_ends_by_itself_is_shown_and_the_run_is_good(pool: WorkerPool, screen: Screen, tmp_path: Any) -> None:
    """A verdict is not final: a call that is only late may still come."""
    go = tmp_path / "go"
    pool.push(go=str(go))
    pool.run_cell(
        "import threading\ndef late():\n    while not os.path.exists(go):\n        time.sleep(0.01)\n    dist.barrier()\n"
        "if rank == 1:\n    thread = threading.Thread(target=late)\n    thread.start()"
    )

    def release() -> None:
        until(lambda: screen.displays, "the hang is shown", SHOWN_S)
        go.touch()

    pool_interrupt, pool.interrupt = pool.interrupt, lambda: None  # type: ignore[method-assign]
    try:
        raised = during(pool, "if rank == 0:\n    dist.barrier()", release)
    finally:
        pool.interrupt = pool_interrupt  # type: ignore[method-assign]
    assert raised is None
    assert "rank 1 finished the cell; rank 0 waits in barrier" in screen.displays[0]["text/plain"]


# ---- what only takes long shows nothing ------------------------------------------------------------------------------

BUSY = {
    "computing": ("if rank == 1:\n    while True:\n        pass\ndist.barrier()", "straggler", "rank 1 is still"),
    "sleeping": ("if rank == 1:\n    time.sleep(1000)\ndist.barrier()", "straggler", "rank 1 is still busy at Cell In[2], line 2"),
    "in C, alone": (
        "ctypes.CDLL(None).usleep(1000 * 1000000)",
        "native code",
        "ranks 0-1 are at Cell In[2], line 1, outside collectives, and sleep or wait there",
    ),
    "in C, awaited": (
        "if rank == 1:\n    ctypes.CDLL(None).usleep(1000 * 1000000)\ndist.barrier()",
        "straggler",
        "rank 1 is still busy at Cell In[2], line 2; rank 0 waits in barrier",
    ),
}


@pytest.mark.parametrize("way", BUSY)
def test_run_that_may_still_end_is_explained_on_request_and_shows_no_hang(pool: WorkerPool, screen: Screen, way: str) -> None:
    cell, kind, text = BUSY[way]
    found: list[Diagnosis] = []

    def look() -> None:
        found.append(seen(pool, lambda diagnosis: diagnosis.kind == kind and text in diagnosis.verdict))

    raised = during(pool, cell, look, cell_number=2)
    assert isinstance(raised, RunInterrupted)
    assert not found[0].hangs
    assert screen.displays == []


def test_rank_that_holds_pythons_lock_does_not_answer_and_is_named(pool: WorkerPool, screen: Screen) -> None:
    """The run cannot be interrupted either, so let it finish."""
    found: list[Diagnosis] = []
    cell = "ctypes.PyDLL(None).usleep(3 * 1000000)"

    def look() -> None:
        found.append(seen(pool, lambda diagnosis: diagnosis.kind == "no answer"))
        until(lambda: pool.diagnose().kind == "idle", "the run has ended", SHOWN_S)

    assert during(pool, cell, look) is None
    assert found[0].verdict.startswith("ranks 0-1 did not answer: native code there holds Python's lock")


# ---- on request ------------------------------------------------------------------------------------------------------


def test_diagnosis_without_a_run_says_so(pool: WorkerPool) -> None:
    found = pool.diagnose()
    assert (found.kind, found.hangs) == ("idle", False)
    assert [state.state for state in found.states] == ["idle", "idle"]


def test_diagnosis_is_there_at_once_also_before_the_first_look(pool: WorkerPool) -> None:
    took: list[float] = []

    def look() -> None:
        seen(pool, lambda diagnosis: diagnosis.kind == "missing rank")
        began = time.monotonic()
        pool.diagnose()
        took.append(time.monotonic() - began)

    with other_limits(first_look_s=1000.0):
        assert isinstance(during(pool, "if rank == 0:\n    dist.barrier()", look), RunInterrupted)
    assert took[0] < 0.5 * LOAD


def test_time_limit_carries_the_diagnosis(pool: WorkerPool) -> None:
    with pytest.raises(RunTimeoutError, match="the run did not finish in 1 s") as caught:
        pool.run_cell("if rank == 0:\n    dist.barrier()", timeout_s=1, cell_number=5)
    assert caught.value.diagnosis.startswith("rank 1 finished the cell; rank 0 waits in barrier")
    assert "at Cell In[5], line 2 for it." in str(caught.value)


def test_rank_that_cannot_be_looked_at_is_interrupted_all_the_same(pool: WorkerPool, screen: Screen) -> None:
    pool.run_cell(
        "from labkit.worker.run import introspection\n"
        "look = introspection.report\n"
        "def fails(state): raise RuntimeError('no look')\n"
        "if rank == 1: introspection.report = fails"
    )
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell("import torch.distributed as dist\nif rank == 1: dist.barrier()", timeout_s=3.0)
    assert caught.value.interrupted_ranks == (1,)
    assert pool.run_cell("introspection.report = look\ndist.barrier()\nrank", want_value=True) == {0: 0, 1: 1}


def test_stop_that_broke_nothing_says_that_the_variables_are_kept(pool: WorkerPool) -> None:
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell("time.sleep(1000)", timeout_s=0.5)
    assert caught.value.notes[-1] == "Every rank keeps its variables."
