"""Bad input gets a clear error with advice, before anything is sent, and the open pool works as before."""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit import LabkitError, PoolStateError, WorkerPool, current_pool
from labkit.errors import InvalidPoolError, InvalidRunError, RankSpecError, WireError


@pytest.fixture(autouse=True)
def _pool_is_unharmed(pool: WorkerPool) -> Iterator[None]:
    """Require after each bad input that the same ranks answer, with their variables and a working group."""
    pids = pool.pids
    pool.push(kept="here")
    yield
    assert current_pool() is pool
    assert pool.pids == pids
    total = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\n(kept, float(ones))"
    results = pool.run_cell(total, want_value=True, timeout_s=30)
    assert results is not None
    assert results.same() == ("here", 2.0)


def refused(kind: type[Exception], act: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert isinstance(caught.value, LabkitError)
    return str(caught.value)


# ---- a pool that cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "says"),
    [
        (0, "at least 1, not 0"),
        (-1, "at least 1, not -1"),
        (True, "an integer, not True"),
        (1.5, "an integer, not 1.5"),
        ("4", "an integer, not '4'"),
        ([2], "an integer, not [2]"),
        (math.nan, "an integer, not nan"),
        (1000, "at most 256 workers"),
        (10**30, "at most 256 workers"),
    ],
)
def test_impossible_world_size_is_refused(world_size: Any, says: str) -> None:
    for replace in (False, True):
        assert says in refused(InvalidPoolError, lambda replace=replace: WorkerPool(world_size, replace=replace))


def test_unknown_device_is_refused_with_the_known_ones() -> None:
    for device in ("gpu", "cuda:0", "CPU", "", None, 0):
        text = refused(InvalidPoolError, lambda device=device: WorkerPool(2, device, replace=True))
        assert f"unknown device {device!r}. Write 'auto', 'cpu' or 'cuda'." in text


def test_cuda_where_there_is_no_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = refused(InvalidPoolError, lambda: WorkerPool(2, "cuda", replace=True))
    assert "needs a GPU" in text
    assert "device='auto' or 'cpu'" in text


def test_second_pool_is_refused_with_the_three_ways_on(pool: WorkerPool) -> None:
    text = refused(PoolStateError, lambda: WorkerPool(2, "cpu"))
    for way in ("current_pool()", "pool.close()", "replace=True"):
        assert way in text


# ---- a run that cannot be --------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[WorkerPool, Any], Any]] = {
    "run": lambda pool, ranks: pool.run(lambda: 1, ranks=ranks),
    "run_cell": lambda pool, ranks: pool.run_cell("1", ranks=ranks),
    "push": lambda pool, ranks: pool.push(x=1, ranks=ranks),
    "pull": lambda pool, ranks: pool.pull("rank", ranks=ranks),
}


@pytest.mark.parametrize("call", CALLS)
def test_impossible_rank_set_is_refused(pool: WorkerPool, call: str) -> None:
    for ranks in (2, -1, [0, 5], "0-9", [], "", "a", "1-0", True, 0.5, ["0"]):
        refused(RankSpecError, lambda ranks=ranks: CALLS[call](pool, ranks))


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, "5", True, [1]], ids=repr)
def test_impossible_time_limit_is_refused(pool: WorkerPool, timeout_s: Any) -> None:
    acts: list[Callable[[], Any]] = [
        lambda: pool.run(lambda: 1, timeout_s=timeout_s),
        lambda: pool.run_cell("1", timeout_s=timeout_s),
        lambda: pool.push(x=1, timeout_s=timeout_s),
        lambda: pool.pull("rank", timeout_s=timeout_s),
    ]
    for act in acts:
        assert f"a number above 0, not {timeout_s!r}" in refused(InvalidRunError, act)


def test_largest_time_limits_are_taken(pool: WorkerPool) -> None:
    assert pool.run(lambda: 1, timeout_s=math.inf).same() == 1
    assert pool.run(lambda: 1, timeout_s=10**12).same() == 1


def test_what_cannot_be_called_is_refused(pool: WorkerPool) -> None:
    for function in (None, 5, "print(1)"):
        assert f"{function!r} cannot be called" in refused(InvalidRunError, lambda function=function: pool.run(function))


def test_unpicklable_things_are_refused_and_named(pool: WorkerPool) -> None:
    lock = threading.Lock()
    assert "argument 0" in refused(WireError, lambda: pool.run(len, lock))
    assert "argument 'key'" in refused(WireError, lambda: pool.run(dict, key=lock))
    assert "the variable 'lock'" in refused(WireError, lambda: pool.run(lambda: lock))
    assert "the variable 'handle'" in refused(WireError, lambda: pool.push(handle=lock))


def test_the_pool_itself_stays_in_the_notebook(pool: WorkerPool) -> None:
    assert "WorkerPool cannot be sent" in refused(WireError, lambda: pool.run(lambda: pool))


def test_text_that_is_no_expression_cannot_be_pulled(pool: WorkerPool) -> None:
    for expression in ("", "x = 1", "a b", "1 +", "import os"):
        with pytest.raises(SyntaxError):
            pool.pull(expression)


def test_empty_cell_runs_and_shows_nothing(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    for cell in ("", "\n\n", "# only a comment", "pass"):
        pool.run_cell(cell)
    assert capsys.readouterr() == ("", "")


def test_second_run_is_refused_while_one_is_in_progress_and_the_first_goes_on(pool: WorkerPool) -> None:
    answers: list[Any] = []

    def wait() -> str:
        import time

        deadline = time.monotonic() + 20
        while not os.path.exists(go) and time.monotonic() < deadline:
            time.sleep(0.01)
        return "finished"

    with tempfile.TemporaryDirectory() as folder:
        go = os.path.join(folder, "go")
        runner = threading.Thread(target=lambda: answers.append(pool.run(wait)))
        runner.start()
        until = time.monotonic() + 10
        while not pool._life.runner._busy.locked():
            assert time.monotonic() < until
            time.sleep(0.005)
        for act in (lambda: pool.pull("rank"), lambda: pool.run(len, []), pool.close, pool.restart):
            assert "a run is in progress" in refused(PoolStateError, act)
        Path(go).touch()
        runner.join(20)
    assert answers[0].same() == "finished"
