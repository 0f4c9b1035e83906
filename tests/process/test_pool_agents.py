"""A pool whose ranks are started by agents on this machine: the code of a pool on several machines, tested on one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import labkit
from labkit import PoolStateError, RankFailedError, RunTimeoutError, WorkerDiedError, WorkerPool
from labkit.base.limits import other_limits
from labkit.controller.machines import attach
from labkit.controller.machines.agents import LocalAgents
from labkit.controller.machines.attach import AttachedSite, Meeting
from labkit.controller.machines.launch_text import Launch
from labkit.controller.machines.node import Node
from labkit.controller.run.members import Members
from labkit.controller.start import pool_plan
from labkit.errors import InvalidPoolError, WorkerStartError
from labkit.wire.key_file import KeyFile
from labkit.wire.transport import Keys
from labkit.worker.__main__ import main as agent_main
from tests.matrix import matrix
from tests.process.patience import DEATH_S, LOAD, ORPHANS_S, survivors, until

# Each start imports torch anew.
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


def test_s1_ranks_meet_in_another_store_when_theirs_has_ended(pool: WorkerPool) -> None:
    before = end_store(pool)
    until(lambda: pool.nodes and not node_0(pool).store, "the notebook knows that the store has ended")
    restart_rank_1(pool)
    assert pool._life.runner.members._world.group(0).store != before


def test_s1_a_store_whose_end_nobody_knows_yet_costs_no_rank_its_variables(
    pool: WorkerPool,
) -> None:
    """Pretend that the store has not ended, as in the moment before the news of it."""
    former = node_0(pool).store
    end_store(pool)
    until(lambda: pool.nodes and not node_0(pool).store, "the notebook knows that the store has ended")
    node_0(pool).store = former  # as if it did not know
    pool.run_cell("from labkit.base.limits import LIMITS\nLIMITS.connect_s = 2.0", ranks=0)
    with pytest.raises(PoolStateError, match=r"could not form their groups .*rank 0 keeps its variables"):
        restart_rank_1(pool)
    node_0(pool).store = ""
    pool.run_cell("LIMITS.connect_s = 20.0", ranks=0)
    pool.restart([1])
    assert pool.pull("kept", ranks=0)[0] == 0


def node_0(pool: WorkerPool) -> Node:
    """Node 0, as the notebook knows it."""
    return pool._life.site.nodes.nodes[0]  # type: ignore[attr-defined, no-any-return]


def end_store(pool: WorkerPool) -> str:
    """Kill the store of the pool; return the address at which its ranks met."""
    before = pool._life.runner.members._world.group(0).store
    (store,) = (item for item in _descendants() if _listens(item, before) and item.pid not in pool.pids.values())
    store.kill()
    until(lambda: not survivors([store]), "the store has ended")
    return before


def restart_rank_1(pool: WorkerPool) -> None:
    """Let rank 1 die while rank 0 waits for it, and replace it."""
    pool.run_cell("import torch.distributed as dist\nkept = rank")
    with pytest.raises(WorkerDiedError):
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


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_c4_interrupt_while_the_pool_closes_comes_when_agents_port_and_files_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    before, close = _left(), Members.close

    def interrupt_and_close(self: Members, *, kill: bool = False) -> None:
        _interrupt()
        close(self, kill=kill)

    pool = WorkerPool(1, "cpu", launcher="agents", replace=True)
    with monkeypatch.context() as patch:
        patch.setattr(Members, "close", interrupt_and_close)
        with pytest.raises(KeyboardInterrupt):
            pool.close()
    assert pool.closed
    assert not list(filter(_is_agent, _descendants()))
    assert _left() <= before


def test_c4_interrupt_of_a_restart_between_old_and_new_ranks_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, close = _left(), Members.close

    def close_and_interrupt(self: Members, *, kill: bool = False) -> None:
        close(self, kill=kill)
        _interrupt()

    pool = WorkerPool(1, "cpu", launcher="agents", replace=True)
    with monkeypatch.context() as patch:
        patch.setattr(Members, "close", close_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.restart()
    assert pool.closed
    assert not list(filter(_is_agent, _descendants()))
    assert _left() <= before


@pytest.mark.parametrize("moment", matrix("agents are here", "another pool does not close"))
def test_c6_start_that_is_broken_off_when_its_agents_have_come_leaves_nothing(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    before = _left()
    if moment == "agents are here":
        prepare = AttachedSite.prepare

        def prepare_and_interrupt(self: AttachedSite, *args: Any) -> None:
            prepare(self, *args)
            _interrupt()

        monkeypatch.setattr(AttachedSite, "prepare", prepare_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            WorkerPool(1, "cpu", launcher="agents", replace=True)
    else:
        with WorkerPool(1, "cpu", replace=True) as other, other._life.runner.alone(), pytest.raises(PoolStateError):
            WorkerPool(1, "cpu", launcher="agents", replace=True)
    assert not list(filter(_is_agent, _descendants()))
    assert _left() <= before


def test_c6_ranks_wait_on_where_something_is_in_the_way_of_coming_back_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_file, folder = tmp_path / "labkit.key", tmp_path / "agents"
    agents = LocalAgents(folder)
    site = AttachedSite(
        Meeting(1, 1, "tcp://127.0.0.1:*", "127.0.0.1", "cpu", 60.0, on_one_machine=True), key_file, agents, outlives_notebook=True
    )
    try:
        lost = WorkerPool(launcher=site, start_timeout_s=120.0, replace=True)
        lost.push(kept=41)
        lost.abandon()
        site.abandon()
        with monkeypatch.context() as patch:
            patch.setattr(pool_plan, "attached_plan", lambda *args: (_ for _ in ()).throw(InvalidPoolError("in the way")))
            with pytest.raises(InvalidPoolError, match="in the way"):
                WorkerPool.reattach(key_file)
        with pytest.raises(PoolStateError, match="no pool is open"):
            labkit.current_pool()
        with WorkerPool.reattach(key_file) as pool:
            assert pool.pull("kept").same() == 41
        assert not key_file.exists()
    finally:
        agents.end()


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
    assert len(pids) >= 5  # the agent, its fork server, the store, the ranks
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    kernel.stdout.close()
    until(lambda: not any(_runs(pid) for pid in pids), "the agent and what it has started have ended", 15)


def test_a_played_machine_that_has_stopped_is_waited_for_by_nobody_and_ends_with_the_pool() -> None:
    limits = other_limits(end_s=0.5, agents_end_s=1.0)
    with limits, WorkerPool(2, "cpu", launcher="agents", num_nodes=2, replace=True) as pool:
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


def test_an_agent_that_cannot_start_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = Launch.arguments
    monkeypatch.setattr(Launch, "arguments", lambda self: [*arguments(self), "--wait", "nan"])
    with pytest.raises(WorkerStartError, match=r"its agent has ended[\s\S]*argument --wait: invalid"):
        WorkerPool(1, "cpu", launcher="agents", replace=True)


def test_an_agent_runs_where_labkit_is_not_installed_but_found_on_the_path(tmp_path: Path) -> None:
    """As on a machine that mounts a checkout, there are no installed metadata with labkit's version."""
    (tmp_path / "labkit").symlink_to(Path(labkit.__file__).parent)
    code = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; from labkit.wire.versions import versions"
    command = [sys.executable, "-S", "-c", f"{code}; print(versions()['labkit'])"]
    asked = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, check=False)
    assert (asked.stdout.strip(), asked.stderr) == (labkit.__version__, "")


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("slurm", r"unknown launcher 'slurm'\. Write 'local' or 'agents'"),
        ("torchrun", r"labkit starts its agents itself now, without torchrun\. Write 'local' or 'agents'"),
    ],
)
def test_s1_an_unknown_launcher_is_refused_and_the_former_one_with_its_new_name(launcher: Any, message: str) -> None:
    with pytest.raises(InvalidPoolError, match=message):
        WorkerPool(1, launcher=launcher)


@pytest.mark.parametrize("option", ["--linger", "--wait"])
@pytest.mark.parametrize("seconds", ["nan", "-1", "soon"])
def test_an_agent_refuses_a_time_that_is_none(option: str, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["worker", "--connect", "tcp://a:1", "--key-file", "b", f"{option}={seconds}"])
        with pytest.raises(SystemExit):
            agent_main()
    assert f"argument {option}: invalid" in capsys.readouterr().err


@pytest.mark.parametrize("number", matrix(signal.SIGTERM, signal.SIGINT))
def test_s1_an_agent_that_is_asked_to_end_says_so_and_ends_with_all_it_started(tmp_path: Path, number: signal.Signals) -> None:
    """A scheduler asks with SIGTERM, a person with Ctrl-C in the shell in which it was started."""
    KeyFile.of(Keys.generate()).write(tmp_path / "labkit.key")
    command = [sys.executable, "-m", "labkit.worker", "--connect", "tcp://127.0.0.1:1", "--key-file", str(tmp_path / "labkit.key")]
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    below: list[psutil.Process] = []
    until(lambda: below.extend(psutil.Process(agent.pid).children()) or below, "the agent has started its fork server")
    agent.send_signal(number)
    assert agent.communicate(timeout=30)[1] == f"labkit: it was asked to end ({number.name})\n"
    assert agent.returncode == 1
    until(lambda: not survivors(below), "its fork server has ended", ORPHANS_S)


def test_an_agent_that_is_killed_ends_with_its_ranks_and_restart_begins_from_the_start() -> None:
    with WorkerPool(2, "cpu", launcher="agents", replace=True) as pool:
        (agent,) = (item for item in psutil.Process().children() if _is_agent(item))
        below = agent.children(recursive=True)
        agent.kill()
        until(lambda: not pool.nodes[0].reachable, "the notebook knows that its machine is gone", DEATH_S)
        until(lambda: not survivors(below), "its fork server, the store and the ranks have ended", ORPHANS_S)
        with pytest.raises(PoolStateError, match=r"ranks 0-1 are dead .*pool\.restart\(\)"):
            pool.run(lambda: 1)
        pool.restart()
        assert pool.run(lambda: 1).same() == 1


def test_s1_a_store_that_cannot_be_opened_is_named_and_played_machines_then_have_their_own_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if all machines reached the notebook through tunnels, they have no route to each other."""
    monkeypatch.setattr(attach, "Meeting", lambda *args, **more: Meeting(*args, **more | {"on_one_machine": False}))
    with pytest.raises(PoolStateError, match=r"node 0 \(.*\) opens no store .* set GLOO_SOCKET_IFNAME"):
        WorkerPool(2, "cpu", launcher="agents", num_nodes=2, replace=True)
    assert not [item for item in _descendants() if _is_agent(item)]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("SLURM_NODEID", "7")  # the notebook's own scheduler, which does not know the simulated machines
    with WorkerPool(2, "cpu", launcher="agents", num_nodes=2, replace=True) as pool:
        assert [node.node_rank for node in pool.nodes] == [0, 1]
        assert pool.run_cell(SUM, want_value=True).same() == 2.0  # type: ignore[union-attr]


def _left() -> set[Path]:
    """labkit's leftovers in the folder for temporary files."""
    return set(Path(tempfile.gettempdir()).glob("labkit-*"))


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _is_agent(item: psutil.Process) -> bool:
    return "labkit.worker" in item.cmdline()


def _listens(item: psutil.Process, store: str) -> bool:
    port = int(store.removeprefix("tcp://").partition("/")[0].rpartition(":")[2])
    return any(found.laddr.port == port for found in item.net_connections("tcp") if found.status == psutil.CONN_LISTEN)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
