"""A pool whose ranks torchrun starts on this machine: the way of a pool on several machines, tested wherever labkit is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import labkit
from labkit import PoolStateError, RankFailedError, RunTimeoutError, WorkerDiedError, WorkerPool
from labkit.controller.launch_text import Launch
from labkit.errors import InvalidPoolError, WorkerStartError
from labkit.worker.__main__ import main as agent_main
from labkit.worker.place import Place
from tests.process.patience import DEATH_S, LOAD, ORPHANS_S, survivors, until

# Two imports of torch one after the other for each start.
pytestmark = pytest.mark.timeout(300)

SUM = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, "cpu", launcher="agents", replace=True) as pool:
        yield pool


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the ranks work together."""
    yield
    if "pool" in request.fixturenames:
        assert request.getfixturevalue("pool").run_cell(SUM, want_value=True, timeout_s=60).same() == 2.0


def test_values_go_there_and_come_back(pool: WorkerPool) -> None:
    small, large = {"a": [1, 2]}, torch.arange(1 << 20)
    pool.push(small=small, large=large)
    assert pool.pull("small").same() == small
    assert torch.equal(pool.pull("large")[1], large)
    assert pool.run(lambda x: x.sum().item(), large).same() == large.sum().item()


def test_a_pushed_tensor_is_each_rank_s_own(pool: WorkerPool) -> None:
    pool.push(mine=torch.zeros(1 << 20))
    pool.run_cell("if rank == 0:\n    mine.fill_(1)")
    assert pool.run_cell("float(mine.sum())", want_value=True) == {0: float(1 << 20), 1: 0.0}


def test_what_is_pushed_and_pulled_leaves_no_memory_behind_in_the_agent(pool: WorkerPool) -> None:
    (ours,) = (item for item in _descendants() if _is_agent(item))
    before = ours.num_fds()
    for _ in range(3):
        pool.push(big=torch.zeros(1 << 20))
        pool.pull("big")
        with pytest.raises(RankFailedError):
            pool.run(lambda x: 1 / 0, torch.zeros(1 << 20))
    assert ours.num_fds() <= before


def test_output_and_errors_are_those_of_any_pool(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError, match="rank 1: ValueError: boom"):
        pool.run_cell("print('hello')\nif rank == 1:\n    raise ValueError('boom')")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]


def test_a_hang_is_freed_and_variables_are_kept(pool: WorkerPool) -> None:
    pool.run_cell(f"{SUM}\nkept = rank")
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell("if rank == 0:\n    dist.barrier()", timeout_s=1)
    assert "rank 1 finished the cell; rank 0 waits in barrier" in caught.value.diagnosis
    assert pool.pull("kept") == {0: 0, 1: 1}


def test_a_hang_in_new_group_is_freed_although_its_store_is_on_the_network(pool: WorkerPool) -> None:
    pool.run_cell(SUM)
    with pytest.raises(RunTimeoutError):
        pool.run_cell("if rank == 0:\n    dist.new_group([0, 1])", timeout_s=1)


def test_a_dead_rank_is_replaced_and_the_other_keeps_its_variables(pool: WorkerPool) -> None:
    pool.run_cell("kept = rank")
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        pool.run_cell("import os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    pool.restart([1])
    assert pool.pull("kept", ranks=0)[0] == 0


def test_closing_leaves_no_process_and_no_file_and_the_pool_can_be_started_again() -> None:
    before = _left()
    pool = WorkerPool(1, "cpu", launcher="agents", replace=True)
    ours = [item for item in _descendants() if _is_agent(item)]
    assert len(ours) == 1
    pool.close()
    until(lambda: not any(item.is_running() for item in ours), "the agent has ended")
    assert _left() <= before
    pool.restart()
    assert pool.run(lambda: 7).same() == 7
    pool.close()


def test_nothing_is_left_of_a_kernel_that_is_killed() -> None:
    code = (
        "import json, labkit, psutil\npool = labkit.WorkerPool(2, 'cpu', launcher='agents')\n"
        "print(json.dumps([item.pid for item in psutil.Process().children(recursive=True)]), flush=True)\n"
        "pool.run_cell('import time\\nwhile True: time.sleep(1)')"
    )
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ)
    assert kernel.stdout is not None
    pids = json.loads(kernel.stdout.readline())
    assert len(pids) >= 4  # torchrun, the agent, its fork server, the ranks
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    kernel.stdout.close()
    until(lambda: not any(_runs(pid) for pid in pids), "torchrun, its agent and the ranks have ended", 15)


def test_a_played_machine_that_has_stopped_is_waited_for_by_nobody_and_ends_with_the_pool() -> None:
    with WorkerPool(2, "cpu", launcher="agents", num_nodes=2, replace=True) as pool:
        pool.run_cell("kept = rank")
        stopped = [psutil.Process(pool.nodes[1].agent_pid), psutil.Process(pool.pids[1])]
        for item in stopped:
            item.suspend()
        until(lambda: not pool.nodes[1].reachable, "the notebook knows that the machine is out of reach", 5 * LOAD)
        with pytest.raises(PoolStateError, match=r"When the machine is back: pool\.restart\(\[1\]\)"):
            pool.run(lambda: 1)
        for restart in (pool.restart, lambda: pool.restart([1])):
            with pytest.raises(
                PoolStateError, match=r"node 1 .*\(rank 1\) is out of reach\. It is played here: wake its processes"
            ):
                restart()
        assert pool.pull("kept", ranks="0") == {0: 0}
    until(lambda: not survivors(stopped), "the stopped agent and its rank have ended", ORPHANS_S)


def test_torchrun_that_cannot_start_the_agent_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "")
    monkeypatch.setenv("LOGLEVEL", "NOT_A_LEVEL")
    with pytest.raises(WorkerStartError, match="torchrun has ended") as caught:
        WorkerPool(1, "cpu", launcher="agents", replace=True)
    assert "NOT_A_LEVEL" in str(caught.value)


def test_an_agent_that_cannot_start_is_quoted_and_torchrun_s_summary_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = Launch.arguments
    monkeypatch.setattr(Launch, "arguments", lambda self, endpoint: [*arguments(self, endpoint), "--wait", "nan"])
    with pytest.raises(WorkerStartError, match=r"torchrun has ended[\s\S]*argument --wait: invalid") as caught:
        WorkerPool(1, "cpu", launcher="agents", replace=True)
    assert "ChildFailedError" not in str(caught.value)


def test_an_agent_runs_where_labkit_is_not_installed_but_found_on_the_path(tmp_path: Path) -> None:
    """As on a machine that mounts a checkout: there are no installed metadata to ask for labkit's version."""
    (tmp_path / "labkit").symlink_to(Path(labkit.__file__).parent)
    code = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; from labkit.wire.versions import versions"
    command = [sys.executable, "-S", "-c", f"{code}; print(versions()['labkit'])"]
    asked = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, check=False)
    assert (asked.stdout.strip(), asked.stderr) == (labkit.__version__, "")


def test_an_unknown_launcher_is_refused() -> None:
    with pytest.raises(InvalidPoolError, match=r"unknown launcher 'slurm'\. Write 'local' or 'torchrun'"):
        WorkerPool(1, launcher="slurm")  # type: ignore[arg-type]


def test_an_agent_that_is_started_otherwise_says_how() -> None:
    with pytest.raises(WorkerStartError, match=r"start this with torchrun, by the command that WorkerPool\.attach\(\) shows"):
        Place.from_environment({})


@pytest.mark.parametrize("option", ["--linger", "--wait"])
@pytest.mark.parametrize("seconds", ["nan", "-1", "soon"])
def test_an_agent_refuses_a_time_that_is_none(option: str, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["worker", "--connect", "tcp://a:1", "--key-file", "b", f"{option}={seconds}"])
        with pytest.raises(SystemExit):
            agent_main()
    assert f"argument {option}: invalid" in capsys.readouterr().err


def test_an_agent_whose_torchrun_is_killed_ends_with_its_ranks_and_restart_begins_from_the_start() -> None:
    with WorkerPool(2, "cpu", launcher="agents", replace=True) as pool:
        (torchrun,) = (item for item in psutil.Process().children() if "torch.distributed.run" in item.cmdline())
        below = torchrun.children(recursive=True)
        torchrun.kill()
        until(lambda: not pool.nodes[0].reachable, "the notebook knows that its machine is gone", DEATH_S)
        until(lambda: not survivors(below), "the agent, its fork server and the ranks have ended", ORPHANS_S)
        with pytest.raises(PoolStateError, match=r"ranks 0-1 are dead .*pool\.restart\(\)"):
            pool.run(lambda: 1)
        pool.restart()
        assert pool.run(lambda: 1).same() == 1


def _left() -> set[Path]:
    """What labkit and torchrun have left in the folder for temporary files."""
    folder = Path(tempfile.gettempdir())
    return {*folder.glob("labkit-*"), *folder.glob("torchelastic*")}


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _is_agent(item: psutil.Process) -> bool:
    words = item.cmdline()
    return "labkit.worker" in words and "torch.distributed.run" not in words


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
