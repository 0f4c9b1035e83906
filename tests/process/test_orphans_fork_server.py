"""When the fork server itself dies, its workers die too, the pool reports it, and the next pool has a new one."""

from __future__ import annotations

import psutil
import pytest

from labkit import PoolStateError, WorkerDiedError, WorkerPool
from labkit.controller.start.launchers import fork_server
from labkit.errors import WorkerStartError
from tests.process.patience import DEATH_S, lives, process, survivors, until

pytestmark = [
    pytest.mark.skipif(not fork_server.available(), reason="there is no fork server on this system"),
    pytest.mark.timeout(300),  # a new fork server imports torch
]


def kill_server_of(pool: WorkerPool) -> list[psutil.Process]:
    """Kill the fork server of an idle pool, and return all processes that were below it."""
    server = psutil.Process(fork_server.shared().pid)
    below = server.children(recursive=True)
    server.kill()
    until(lambda: pool.dead_ranks == (0, 1), "the pool knows of the deaths", DEATH_S)
    return below


def test_death_of_the_fork_server_ends_its_workers_and_restart_starts_another() -> None:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        server = psutil.Process(fork_server.shared().pid)
        pool.run_cell("import subprocess\nchild = subprocess.Popen(['sleep', '1000'])")
        below = server.children(recursive=True)
        assert len(below) == 4
        pool.push(server=server.pid)
        cell = "import os, signal, time\nif rank == 0:\n    os.kill(server, signal.SIGKILL)\ntime.sleep(1000)"
        with pytest.raises(WorkerDiedError, match="ranks 0-1: died") as caught:
            pool.run_cell(cell, timeout_s=60)
        assert caught.value.failed_ranks == (0, 1)
        until(lambda: not survivors(below), "the workers and their children have ended", DEATH_S)
        with pytest.raises(PoolStateError, match=r"ranks 0-1 are dead .*pool\.restart\(\)"):
            pool.run(lambda: 1)
        pool.restart()
        assert fork_server.shared().pid != server.pid
        assert pool.run(lambda: 1).same() == 1


def test_fork_server_that_dies_while_a_start_waits_for_it_is_reported_and_the_next_start_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm_up = fork_server.ForkServer.warm_up
    killed: list[int] = []

    def kill_and_wait(server: fork_server.ForkServer) -> None:
        psutil.Process(server.pid).kill()
        killed.append(server.pid)
        warm_up(server)

    with WorkerPool(2, device="cpu", replace=True) as pool:
        below = kill_server_of(pool)
        until(lambda: not survivors(below), "the workers have ended", DEATH_S)
        with monkeypatch.context() as patch:
            patch.setattr(fork_server.ForkServer, "warm_up", kill_and_wait)
            with pytest.raises(WorkerStartError, match="the fork server ended with exit code -9"):
                pool.restart()
        assert not lives(process(killed[0]))
        assert (pool.closed, pool.dead_ranks) == (False, (0, 1))
        pool.restart()
        assert pool.run(lambda: 1).same() == 1
