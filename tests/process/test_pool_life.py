"""A pool's life: start, close, restart, replacement, death; a rank's inheritance; the fork server that pools share."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from labkit import PoolStateError, RankFailedError, RunTimeoutError, WorkerDiedError, WorkerPool, current_pool
from labkit.controller.output import TerminalScreen
from labkit.controller.start.launchers import fork_server
from labkit.errors import WorkerStartError


def until(condition: Callable[[], bool], what: str, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(0.01)


def gone(pids: dict[int, int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids.values())


@pytest.fixture(autouse=True)
def _no_pool_is_open() -> Iterator[None]:
    yield
    with pytest.raises(PoolStateError):
        current_pool()


# ---- start and close -------------------------------------------------------------------------------------------------


def test_case_10_twenty_pools_in_a_row_start_and_leave_nothing() -> None:
    before = psutil.Process().num_fds()
    WorkerPool(2, "cpu").close()
    first = psutil.Process().num_fds()
    for _ in range(20):
        pool = WorkerPool(2, "cpu")
        assert pool.run(lambda: world_size).same() == 2  # type: ignore[name-defined]  # noqa: F821
        pids = pool.pids
        pool.close()
        assert gone(pids)
    assert psutil.Process().num_fds() <= max(before, first)


@pytest.mark.parametrize("world_size", [1, 3])
def test_pool_of_any_size_works(world_size: int) -> None:
    with WorkerPool(world_size, "cpu") as pool:
        assert pool.world_size == world_size
        assert pool.device == "cpu"
        assert pool.run(lambda: rank).ranks == tuple(range(world_size))  # type: ignore[name-defined]  # noqa: F821
        assert f"world_size={world_size}" in repr(pool)


def test_pool_without_arguments_fits_this_machine() -> None:
    with WorkerPool() as pool:
        assert pool.world_size >= 1
        assert pool.device in ("cpu", "cuda")


def test_single_rank_shows_text_without_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    with WorkerPool(1, "cpu") as pool:
        pool.run_cell("print('alone')\n5")
    assert capsys.readouterr().out == "alone\n5\n"


def test_context_manager_closes_also_after_an_error() -> None:
    pool = WorkerPool(1, "cpu")
    pids = pool.pids

    def fail() -> None:
        with pool:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert pool.closed
    assert gone(pids)


def test_closing_ends_what_the_ranks_have_started() -> None:
    with WorkerPool(2, "cpu") as pool:
        pool.run_cell("import subprocess, os\nchild = subprocess.Popen(['sleep', '300'])")
        children = dict(pool.pull("child.pid"))
    until(lambda: gone(children), "the ranks' own children ended")


def test_closing_twice_is_harmless_and_the_closed_pool_says_what_to_do() -> None:
    pool = WorkerPool(1, "cpu")
    pool.close()
    pool.close()
    assert pool.closed
    assert repr(pool).endswith("closed")
    assert pool.pids == {}
    assert pool.dead_ranks == ()
    pool.interrupt()
    for act in (
        lambda: pool.run(len, []),
        lambda: pool.push(a=1),
        lambda: pool.pull("a"),
        lambda: pool.run_cell("1"),
        pool.diagnose,
    ):
        with pytest.raises(PoolStateError, match=r"the pool is closed.*pool\.restart\(\)"):
            act()


def test_no_pool_open_says_how_to_start_one() -> None:
    with pytest.raises(PoolStateError, match=r"no pool is open. Start one with: pool = labkit.WorkerPool\(world_size=4\)"):
        current_pool()


# ---- restart and replacement -----------------------------------------------------------------------------------------


def test_restart_gives_fresh_ranks_with_the_same_settings() -> None:
    with WorkerPool(2, "cpu") as pool:
        pool.push(x=1)
        pids = pool.pids
        pool.restart()
        assert gone(pids)
        assert pool.world_size == 2
        assert pool.run_cell("'x' in globals()", want_value=True).same() is False  # type: ignore[union-attr]
        assert current_pool() is pool


def test_restart_opens_a_closed_pool_unless_another_is_open() -> None:
    first = WorkerPool(1, "cpu")
    first.close()
    with WorkerPool(2, "cpu") as second:
        with pytest.raises(PoolStateError, match="a pool is open already"):
            first.restart()
        assert second.run(lambda: 1).same() == 1
    first.restart()
    assert first.run(lambda: 1).same() == 1
    first.close()


def test_replace_closes_the_open_pool_and_takes_its_place() -> None:
    first = WorkerPool(1, "cpu")
    pids = first.pids
    second = WorkerPool(2, "cpu", replace=True)
    assert first.closed
    assert gone(pids)
    assert current_pool() is second
    second.close()


def test_pool_without_a_name_stays_open_as_the_current_pool() -> None:
    pids = WorkerPool(1, "cpu").pids
    gc.collect()
    assert not gone(pids)
    assert current_pool().run(lambda: 1).same() == 1
    current_pool().close()
    assert gone(pids)


# ---- what a rank inherits --------------------------------------------------------------------------------------------


def test_next_pool_takes_over_environment_folder_and_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("answer = 42\n")

    def look() -> tuple[Any, ...]:
        import importlib.util
        import os

        return os.environ.get("LABKIT_PROBE"), os.getcwd(), importlib.util.find_spec("only_here") is not None

    with WorkerPool(1, "cpu") as pool:
        assert pool.run(look).same() == (None, os.getcwd(), False)
    monkeypatch.setenv("LABKIT_PROBE", "set in the notebook")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with WorkerPool(1, "cpu") as pool:
        assert pool.run(look).same() == ("set in the notebook", str(tmp_path), True)
        assert pool.run_cell("import only_here\nonly_here.answer", want_value=True).same() == 42  # type: ignore[union-attr]
    monkeypatch.delenv("LABKIT_PROBE")
    with WorkerPool(1, "cpu") as pool:
        assert pool.run(look).same()[0] is None


def test_variables_of_one_pool_are_not_in_the_next() -> None:
    with WorkerPool(1, "cpu") as pool:
        pool.run_cell("import sys, os\nleft = 1\nsys.modules['left_module'] = sys\nos.environ['LEFT'] = '1'")
    with WorkerPool(1, "cpu") as pool:
        cell = "import sys, os\n('left' in globals(), 'left_module' in sys.modules, 'LEFT' in os.environ)"
        assert pool.run_cell(cell, want_value=True).same() == (False, False, False)  # type: ignore[union-attr]


def test_ranks_share_the_cores() -> None:
    with WorkerPool(2, "cpu") as pool:
        assert pool.pull("__import__('torch').get_num_threads()").same() == int(os.environ.get("OMP_NUM_THREADS", "1"))


# ---- the fork server -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not fork_server.available(), reason="no fork server on this system")
def test_pools_share_one_warm_fork_server() -> None:
    with WorkerPool(1, "cpu") as pool:
        server = fork_server.shared()
        assert server.warm
        assert psutil.Process(pool.pids[0]).ppid() == server.pid
    with WorkerPool(1, "cpu") as pool:
        assert fork_server.shared() is server
        assert psutil.Process(pool.pids[0]).ppid() == server.pid


def test_case_1_ranks_are_no_copies_of_the_notebooks_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process that has used CUDA cannot use CUDA; tests/gpu has the same case with a GPU."""
    monkeypatch.setitem(sys.modules, "begun_here", ModuleType("begun_here"))
    with WorkerPool(2, device="cpu", replace=True) as pool:
        assert pool.pull("'begun_here' in __import__('sys').modules").same() is False
        assert os.getpid() not in pool.pull("__import__('os').getppid()").values()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_figures_are_shown_also_after_the_fork_server_has_imported_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    displays: list[dict[str, Any]] = []
    monkeypatch.setattr(TerminalScreen, "display", lambda self, data, *rest: displays.append(data))
    maps = Path(f"/proc/{fork_server.shared().pid}/maps")
    until(lambda: "matplotlib" in maps.read_text(), "the idle fork server imported matplotlib", 60.0)
    with WorkerPool(1, "cpu") as pool:
        pool.run_cell("import matplotlib.pyplot as plt\nplt.plot([1, 2]);")
    assert ["image/png" in data for data in displays] == [True]


@pytest.mark.skipif(not fork_server.available(), reason="no fork server on this system")
def test_pool_opens_no_port_of_labkits_own() -> None:
    def ports(pid: int) -> set[int]:
        connections = psutil.Process(pid).net_connections("inet")
        return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}

    before = ports(os.getpid())
    with WorkerPool(2, "cpu") as pool:
        assert ports(os.getpid()) == before
        assert ports(fork_server.shared().pid) == set()
        for pid in pool.pids.values():
            # gloo's own listener, on the loopback device only
            listening = [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert all(connection.laddr.ip in ("127.0.0.1", "::1") for connection in listening)


def test_sockets_lie_in_a_private_folder_that_goes_with_the_pool() -> None:
    pool = WorkerPool(1, "cpu")
    folder = Path(pool._life.runner.members._world._directory)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_uid == os.getuid()
    pool.close()
    assert not folder.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_child_of_the_notebook_has_no_pool_and_harms_none() -> None:
    with WorkerPool(2, "cpu") as pool:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    current_pool()
                except PoolStateError:
                    code = 2
                try:
                    pool.run(len, [])
                except PoolStateError:
                    code += 40
                pool.close()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 42
        assert pool.run(lambda: 1).same() == 1


# ---- honest start ----------------------------------------------------------------------------------------------------


def test_pool_is_ready_when_the_call_returns() -> None:
    with WorkerPool(3, "cpu") as pool:
        cell = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"
        assert pool.run_cell(cell, want_value=True, timeout_s=10).same() == 3.0  # type: ignore[union-attr]


def test_rank_that_dies_while_starting_is_named_with_its_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "not a number")
    with pytest.raises(WorkerStartError, match=r"rank [01] did not start") as caught:
        WorkerPool(2, "cpu")
    assert caught.value.exitcode == 1
    assert "not a number" in caught.value.stderr_tail
    assert "No worker is left running" in str(caught.value)
    monkeypatch.undo()
    with WorkerPool(2, "cpu") as pool:
        assert pool.run(lambda: 1).same() == 1


def test_start_that_takes_too_long_names_a_rank_and_leaves_nothing() -> None:
    WorkerPool(1, "cpu").close()  # the fork server is warm now
    with pytest.raises(WorkerStartError, match=r"rank [01] did not start: it was not ready after 0\.001 s"):
        WorkerPool(2, "cpu", start_timeout_s=0.001)


# ---- death -----------------------------------------------------------------------------------------------------------


def test_case_14_exit_of_one_rank_is_reported_and_restart_is_the_way_back() -> None:
    with WorkerPool(2, "cpu") as pool:
        with pytest.raises(WorkerDiedError) as caught:
            pool.run_cell("import os\nif rank == 1:\n    print('last words', flush=True)\n    os._exit(3)")
        error = caught.value
        (death,) = [failure for failure in error.failures if failure.kind == "died"]
        assert (death.rank, death.exitcode) == (1, 3)
        assert "last words" in death.last_output
        assert error.finished == (0,)
        assert pool.dead_ranks == (1,)
        assert "dead: 1" in repr(pool)
        with pytest.raises(PoolStateError, match=r"rank 1 is dead.*pool\.restart\(\) gives fresh ranks"):
            pool.run(lambda: 1)
        pool.restart()
        assert pool.dead_ranks == ()
        assert pool.run(lambda: 1).same() == 1


def test_rank_that_dies_between_runs_is_reported_by_the_next() -> None:
    with WorkerPool(2, "cpu") as pool:
        psutil.Process(pool.pids[0]).kill()
        until(lambda: _notices(pool), "the death was noticed")
        with pytest.raises(PoolStateError, match="rank 0 is dead"):
            pool.run(lambda: 1)


def _notices(pool: WorkerPool) -> bool:
    try:
        pool.run(lambda: 1)
    except (PoolStateError, WorkerDiedError):
        return True
    return False


def test_collectives_are_counted_from_the_readers_first_also_after_new_groups() -> None:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        for _ in range(2):
            with pytest.raises(RunTimeoutError, match="rank 1 finished the cell; rank 0 waits in barrier #1 at "):
                pool.run_cell("import torch.distributed as dist\nif rank == 0: dist.barrier()", timeout_s=1.0)


def test_what_was_called_on_groups_that_are_gone_is_no_call_of_this_run() -> None:
    imports = "import torch, torch.distributed as dist\n"
    with WorkerPool(2, device="cpu", replace=True) as pool:
        pool.run_cell(imports + "dist.all_reduce(torch.ones(1))")
        for _ in range(3):
            with pytest.raises(RunTimeoutError, match=r"rank 0 finished the cell; rank 1 waits in barrier #[12] at "):
                pool.run_cell("if rank != 0: dist.barrier()", timeout_s=1.0)
        pool.restart([1])
        with pytest.raises(RunTimeoutError, match="rank 0 finished the cell; rank 1 waits in barrier #1 at "):
            pool.run_cell(imports + "if rank != 0: dist.barrier()", timeout_s=1.0)
        with pytest.raises(RankFailedError) as caught:
            pool.run_cell("if rank == 1: raise ValueError('boom')\ndist.barrier()", timeout_s=30)
        assert "rank 1 failed; rank 0 waits in barrier #1" in caught.value.diagnosis
