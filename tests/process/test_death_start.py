"""A start that fails or is interrupted names the reason and leaves nothing: no process, no thread, no socket, no file."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from labkit import PoolStateError, WorkerPool, current_pool
from labkit.controller.run.members import Members
from labkit.controller.start.launchers import fork_server
from labkit.controller.start.launchers.fork_server import ForkServer
from labkit.controller.start.launchers.launcher import OnExit
from labkit.controller.start.world import LocalWorld
from labkit.errors import WorkerStartError
from labkit.wire.spec import WorkerSpec
from tests.process.patience import DEATH_S, LOAD, until

pytestmark = pytest.mark.skipif(not fork_server.available(), reason="the moments of a start are those of the fork server")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Require after each failed start that no pool is open, the fork server has no child, and the next start works."""
    fork_server.shared().warm_up()
    yield
    with pytest.raises(PoolStateError, match="no pool is open"):
        current_pool()
    server = psutil.Process(fork_server.shared().pid)
    until(lambda: not server.children(), "the fork server has no child", DEATH_S)
    with WorkerPool(2, device="cpu") as pool:
        assert pool.run(lambda: 1).same() == 1


def after_start_of(rank: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call a function after the process of one rank has been started, before the next one is."""
    start = ForkServer.start

    def start_and_act(server: ForkServer, spec: WorkerSpec, on_exit: OnExit) -> int:
        pid = start(server, spec, on_exit)
        if spec.rank == rank:
            act(pid)
        return pid

    monkeypatch.setattr(ForkServer, "start", start_and_act)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT], ids=lambda number: number.name)
def test_case_7_rank_that_dies_while_starting_is_named_with_its_signal(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Rank 0 waits for rank 1, whose process is not there yet."""
    after_start_of(0, monkeypatch, lambda pid: os.kill(pid, number))
    began = time.monotonic()
    with pytest.raises(WorkerStartError, match="rank 0 did not start") as caught:
        WorkerPool(2, device="cpu")
    assert time.monotonic() - began < 2.0 * LOAD
    assert (caught.value.rank, caught.value.exitcode) == (0, -number)
    assert "No worker is left running" in str(caught.value)


def test_case_7_rank_that_cannot_reach_the_others_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(WorkerStartError, match=r"rank [01] did not start") as caught:
        WorkerPool(2, device="cpu")
    assert caught.value.exitcode == 1
    assert "nowhere0" in caught.value.stderr_tail
    monkeypatch.undo()


def test_case_7_rank_that_cannot_enter_the_folder_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LocalWorld._spec

    def elsewhere(self: LocalWorld, *args: object, **options: object) -> WorkerSpec:
        found = spec(self, *args, **options)  # type: ignore[arg-type]
        object.__setattr__(found, "cwd", "/no/such/folder")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LocalWorld, "_spec", elsewhere)
        with pytest.raises(WorkerStartError, match=r"rank [01] did not start") as caught:
            WorkerPool(2, device="cpu")
    assert "No such file or directory: '/no/such/folder'" in caught.value.stderr_tail


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


STEPS = {
    "before the first process": "start",
    "after the first process": "",
    "while all get ready": "await_ready",
    "while they are heard of": "_take_note",
}


@pytest.mark.parametrize("moment", STEPS)
def test_case_11_interrupted_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    with monkeypatch.context() as patch:
        if moment == "after the first process":
            after_start_of(0, patch, lambda pid: interrupt())
        else:
            name = STEPS[moment]
            step = getattr(Members, name)

            def step_and_interrupt(*args: object) -> object:
                interrupt()
                return step(*args)

            patch.setattr(Members, name, step_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            WorkerPool(2, device="cpu")


def test_case_11_second_interrupt_does_not_break_off_the_cleaning_up(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Members.close

    def interrupt_and_close(self: Members, *, kill: bool = False) -> None:
        interrupt()
        close(self, kill=kill)
        interrupt()

    with monkeypatch.context() as patch:
        after_start_of(1, patch, lambda pid: interrupt())
        patch.setattr(Members, "close", interrupt_and_close)
        with pytest.raises(KeyboardInterrupt):
            WorkerPool(2, device="cpu")


def test_interrupt_while_a_pool_closes_comes_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Members.close

    def interrupt_and_close(self: Members, *, kill: bool = False) -> None:
        interrupt()
        close(self, kill=kill)

    pool = WorkerPool(2, device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(Members, "close", interrupt_and_close)
        with pytest.raises(KeyboardInterrupt):
            pool.close()
    assert pool.closed


@pytest.mark.parametrize("seed", range(3))
def test_case_11_start_that_is_interrupted_at_any_moment_leaves_nothing(seed: int) -> None:
    chance = random.Random(seed)
    interrupted = 0
    for _ in range(2):  # the first start may start the fork server too
        began = time.monotonic()
        with WorkerPool(2, device="cpu"):
            start_s = time.monotonic() - began
    previous = signal.signal(signal.SIGALRM, lambda number, frame: interrupt())
    try:
        for _ in range(4):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, start_s))
                WorkerPool(2, device="cpu")
                signal.setitimer(signal.ITIMER_REAL, 0)
                current_pool().close()
            except KeyboardInterrupt:
                interrupted += 1
                try:  # an interrupt may come when the pool is there and its name is not: then it is the current pool
                    current_pool().close()
                except PoolStateError:
                    pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 0
