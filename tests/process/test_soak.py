"""Random faults in a row. After each the pool answers; at the end no resource has grown."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from labkit import RankFailedError, RunInterrupted, RunTimeoutError, WorkerDiedError, WorkerPool
from labkit.controller.start.launchers import fork_server
from tests.process.patience import DEATH_S, until

MIB = 2**20
PREPARE = "import ctypes, os, signal, subprocess, sys, time, torch, torch.distributed as dist\nkept = rank * 10"
SEED = 20

Fault = Callable[[WorkerPool, random.Random], None]


# ---- after which every rank lives ------------------------------------------------------------------------------------


def raises(pool: WorkerPool, chance: random.Random) -> None:
    with pytest.raises(RankFailedError):
        pool.run_cell(f"if rank == {chance.randrange(2)}:\n    raise ValueError\ndist.barrier()", timeout_s=60)


def raises_with_big_results(pool: WorkerPool, chance: random.Random) -> None:
    def work(bad: int) -> torch.Tensor:
        if rank == bad:  # type: ignore[name-defined]  # noqa: F821
            raise KeyError
        return torch.ones(10**6)

    with pytest.raises(RankFailedError):
        pool.run(work, chance.randrange(2))


def hangs(pool: WorkerPool, chance: random.Random) -> None:
    with pytest.raises(RunTimeoutError):
        pool.run_cell(f"if rank == {chance.randrange(2)}:\n    dist.barrier()", timeout_s=chance.uniform(0.05, 0.3))


def computes_too_long(pool: WorkerPool, chance: random.Random) -> None:
    with pytest.raises(RunTimeoutError):
        pool.run_cell("while True: pass", timeout_s=chance.uniform(0.05, 0.3))


def is_interrupted(pool: WorkerPool, chance: random.Random) -> None:
    act = chance.choice([pool.interrupt, lambda: os.kill(os.getpid(), signal.SIGINT)])
    cell = chance.choice(["time.sleep(1000)", "if rank == 0: dist.barrier()\ntime.sleep(1000)", "while True: dist.barrier()"])
    started = threading.Event()

    def interrupt() -> None:
        until(lambda: pool.diagnose().kind != "idle", "the run has begun")
        act()
        started.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(RunInterrupted):
        pool.run_cell(cell, timeout_s=60)
    thread.join()


def floods(pool: WorkerPool, chance: random.Random) -> None:
    size = chance.randrange(1_000_000, 3_000_000)
    end = chance.choice(["", "\\n"])
    pool.run_cell(f"if rank == 1: _ = sys.stdout.write('x' * {size} + '{end}')", timeout_s=60)


def garbage_arrives(pool: WorkerPool, chance: random.Random) -> None:
    for door in ("commands", "events"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(Path(pool._life.runner.members._world._directory) / door))
            stranger.sendall(chance.randbytes(chance.randrange(1, 2000)))


def one_rank_gets_sigint(pool: WorkerPool, chance: random.Random) -> None:
    with pytest.raises(RankFailedError):
        pool.run_cell("if rank == 1: os.kill(os.getpid(), signal.SIGINT)\ndist.barrier()\ntime.sleep(0.2)", timeout_s=60)


def exits(pool: WorkerPool, chance: random.Random) -> None:
    with pytest.raises(RankFailedError, match="the rank lives on"):
        pool.run_cell("sys.exit(3)")


# ---- after which a rank is dead --------------------------------------------------------------------------------------

DEATHS = ["os.kill(os.getpid(), signal.SIGKILL)", "ctypes.string_at(0)", "os._exit(5)", "os.abort()"]


def dies(pool: WorkerPool, chance: random.Random) -> None:
    others = chance.choice(["dist.barrier()", "pass", "time.sleep(1000)", "print('x' * 100_000)"])
    cell = f"if rank == {chance.randrange(2)}:\n    print('last words')\n    {chance.choice(DEATHS)}\n{others}"
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell(cell, timeout_s=60)
    assert next(failure.last_output for failure in caught.value.failures if failure.kind == "died").startswith("last words")


def dies_idle(pool: WorkerPool, chance: random.Random) -> None:
    victim = chance.randrange(2)
    pool.run_cell("child = subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    psutil.Process(pool.pids[victim]).send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV]))
    until(lambda: pool.dead_ranks == (victim,), "the pool knows of the death", DEATH_S)


def both_die(pool: WorkerPool, chance: random.Random) -> None:
    with pytest.raises(WorkerDiedError):
        pool.run_cell(chance.choice(DEATHS), timeout_s=60)


FAULTS: list[Fault] = [
    raises,
    raises_with_big_results,
    hangs,
    computes_too_long,
    is_interrupted,
    floods,
    garbage_arrives,
    one_rank_gets_sigint,
    exits,
    dies,
    dies_idle,
    both_die,
]


def sequence(length: int, chance: random.Random) -> list[Fault]:
    """Return each kind of fault equally often, in random order."""
    faults = [fault for _ in range(length // len(FAULTS) + 1) for fault in FAULTS][:length]
    chance.shuffle(faults)
    return faults


def check(pool: WorkerPool, chance: random.Random) -> None:
    """Require that the pool answers: as before, or with fresh ranks in place of dead ones."""
    expected = {rank: (rank * 10, 2.0) for rank in range(2)}
    if dead := pool.dead_ranks:
        if len(dead) == 1 and chance.random() < 0.5:
            pool.restart(dead[0])
            pool.run_cell(PREPARE, ranks=dead[0])
        else:
            pool.restart()
            pool.run_cell(PREPARE)
    results = pool.run_cell("ones = torch.ones(1)\ndist.all_reduce(ones)\n(kept, float(ones))", want_value=True, timeout_s=60)
    assert results is not None
    assert dict(results) == expected


def holdings() -> dict[str, int]:
    """Count everything that can leak in this process and in the fork server."""
    gc.collect()
    me, server = psutil.Process(), psutil.Process(fork_server.shared().pid)
    return {
        "descriptors here": me.num_fds(),
        "threads here": me.num_threads(),
        "descriptors of the fork server": server.num_fds(),
        "processes below the fork server": len(server.children(recursive=True)),
    }


@pytest.mark.skipif(not fork_server.available(), reason="there is no fork server on this system")
@pytest.mark.parametrize("length", [15, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_pool_answers_after_each_of_many_faults_and_nothing_is_left(length: int) -> None:
    chance = random.Random(SEED)
    with WorkerPool(2, device="cpu", replace=True) as pool:
        pool.run_cell(PREPARE)
        for fault in FAULTS:  # modules and files that are loaded or opened once are not leaks
            if length > 2 * len(FAULTS):
                fault(pool, chance)
                check(pool, chance)
        pool.restart()
        pool.run_cell(PREPARE)
        before, memory = holdings(), psutil.Process().memory_info().rss
        began = time.monotonic()
        for number, fault in enumerate(sequence(length, chance)):
            try:
                fault(pool, chance)
                check(pool, chance)
            except BaseException as error:
                error.add_note(f"fault {number} of {length}: {fault.__name__}, after {time.monotonic() - began:.0f} s")
                raise
        pool.restart()
        until(lambda: all(count <= before[kind] for kind, count in holdings().items()), f"no more than {before}: {holdings()}", 10)
        grown = psutil.Process().memory_info().rss - memory
        assert grown < 50 * MIB, f"the kernel has grown by {grown / MIB:.0f} MiB"
