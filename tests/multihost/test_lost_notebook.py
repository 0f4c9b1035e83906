"""Ranks when an agent is started again, or when the notebook dies and another one reattaches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from labkit import PoolStateError, RunTimeoutError, WorkerPool
from labkit.controller.machines.launch_text import Launch
from labkit.errors import InvalidPoolError
from tests.matrix import matrix
from tests.multihost.hosts import NETWORK, Host
from tests.process.patience import until

SUM = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"

# A notebook that dies in the middle of a cell.
NOTEBOOK = """
import sys
import labkit
key_file, host = sys.argv[1:]
pool = labkit.WorkerPool.attach(2, 1, "cpu", host=host, key_file=key_file, linger_s=60, start_timeout_s=180)
pool.run_cell("kept = rank + 10")
print("at work", flush=True)
pool.run_cell('''
import time, torch, torch.distributed as dist
for step in range(40):
    time.sleep(0.1)
    total = torch.ones(1)
    dist.all_reduce(total)
    print("step", step)
done = step
''')
"""


@pytest.fixture
def notebook(hosts: list[Host], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", NOTEBOOK, str(tmp_path / "labkit.key"), f"{NETWORK}.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_notebook_that_comes_back_finds_the_run_in_progress_and_every_variable(
    notebook: subprocess.Popen[str], hosts: list[Host], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file = tmp_path / "labkit.key"
    assert notebook.stdout is not None
    lines = iter(notebook.stdout.readline, "")
    shown = next(line for line in lines if "-m labkit.worker" in line)
    for host in hosts:
        host.run(sys.executable, *shown.split()[1:])
    assert any(line.startswith("at work") for line in lines)
    assert any("step 3" in line for line in lines)
    with pytest.raises(InvalidPoolError, match="still runs"):
        WorkerPool.reattach(key_file, replace=True)
    notebook.send_signal(signal.SIGKILL)
    notebook.wait()
    capsys.readouterr()
    with WorkerPool.reattach(key_file, replace=True) as pool:
        assert "[rank 1, node 1] step 39" in capsys.readouterr().out
        assert pool.pull("kept") == {0: 10, 1: 11}
        assert pool.pull("done").same() == 39
        assert pool.run_cell(SUM, want_value=True).same() == 2.0  # type: ignore[union-attr]
        pool.restart([1])
        assert pool.run_cell(SUM, want_value=True).same() == 2.0  # type: ignore[union-attr]
        assert pool.pull("kept", ranks=0)[0] == 10
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidPoolError, match="cannot be read"):
        WorkerPool.reattach(key_file, replace=True)
    until(lambda: not any(host.pids for host in hosts), "nothing is left on the hosts", 30)


def test_ranks_end_with_a_notebook_that_asked_for_no_more(hosts: list[Host], called: list[Launch], tmp_path: Path) -> None:
    pool = WorkerPool.attach(2, 1, "cpu", host=f"{NETWORK}.1", key_file=tmp_path / "labkit.key", start_timeout_s=180, replace=True)
    pool._life.site.abandon()  # type: ignore[attr-defined]
    until(lambda: not any(_running(host, "labkit.worker.start.forkserver") for host in hosts), "no rank is left on the hosts", 10)
    pool.abandon()
    until(lambda: not any(host.pids for host in hosts), "nothing is left on the hosts", 30)


@pytest.fixture
def spare(bridge: None) -> Iterator[Host]:
    host = Host(2)
    yield host
    host.remove()


@pytest.mark.parametrize(("place", "elsewhere"), matrix((0, False), (1, False), (1, True), (0, True)))
def test_s1_an_agent_that_is_started_again_takes_its_place_and_the_other_machine_keeps_its_variables(
    hosts: list[Host], called: list[Launch], tmp_path: Path, spare: Host, place: int, elsewhere: bool
) -> None:
    """Node 0 has the store in which the ranks meet, so a new agent there means another store; elsewhere means another address."""
    key_file = tmp_path / "labkit.key"
    with WorkerPool.attach(2, 1, "cpu", host=f"{NETWORK}.1", key_file=key_file, start_timeout_s=180, replace=True) as pool:
        pool.run_cell("import os\nkept = rank\nhere = os.environ['LABKIT_HOST']")
        (lost,) = (host for host in hosts if str(host.number) == pool.pull("here")[place])
        (agent,) = _running(lost, "labkit.worker")
        os.kill(agent, signal.SIGKILL)
        (spare if elsewhere else lost).agent(called[-1])
        until(lambda: pool.nodes[place].agent_pid != agent and pool.nodes[place].reachable, "the new agent is there", 90)
        with pytest.raises(PoolStateError, match=rf"rank {place} is dead .*pool\.restart\(\[{place}\]\)"):
            pool.run(lambda: 1)
        pool.restart([place])
        assert pool.run_cell(SUM, want_value=True, timeout_s=60).same() == 2.0  # type: ignore[union-attr]
        assert pool.pull("kept", ranks=1 - place)[1 - place] == 1 - place
        for waits in (0, 1):
            with pytest.raises(RunTimeoutError):
                pool.run_cell(f"if rank == {waits}:\n    dist.barrier()", timeout_s=1)
        assert pool.run_cell(SUM, want_value=True, timeout_s=60).same() == 2.0  # type: ignore[union-attr]


def _running(host: Host, word: str) -> list[int]:
    """The host's processes that have that word on their command line."""
    found = []
    for pid in host.pids:
        try:
            words = psutil.Process(pid).cmdline()
        except psutil.NoSuchProcess:
            continue
        if word in words:
            found.append(pid)
    return found
