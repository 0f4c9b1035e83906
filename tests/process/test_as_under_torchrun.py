"""A rank is like a process under torchrun: its random numbers, its environment, the names of its process groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit import RankFailedError, RunTimeoutError, WorkerPool


def value(pool: WorkerPool, source: str, **options: Any) -> Any:
    """Return the value of a cell on each rank."""
    found = pool.run_cell(source, want_value=True, **options)
    assert found is not None
    return found


# ---- random numbers --------------------------------------------------------------------------------------------------


DRAWS = """
import multiprocessing, random, secrets, tempfile, torch, uuid, numpy as np
def drawn():
    mask = torch.nn.functional.dropout(torch.ones(64)).tolist()
    names, key = next(tempfile._get_candidate_names()), bytes(multiprocessing.current_process().authkey)
    new = [np.random.default_rng().random(), secrets.token_hex(8), str(uuid.uuid4()), str(uuid.uuid1()), names, key]
    return [random.random(), np.random.rand(), torch.rand(1).item(), torch.initial_seed(), mask, *new]
drawn()
"""


def test_c1_each_rank_draws_its_own_random_numbers_and_others_after_a_restart() -> None:
    found = []
    with WorkerPool(2, "cpu") as pool:
        for again in (lambda: pool.restart([1]), pool.restart, lambda: None):
            values = value(pool, DRAWS)
            found += [values[0], values[1]] if len(found) != 2 else [values[1]]  # rank 0 draws on after restart([1])
            again()
    for draws in zip(*found, strict=True):
        assert len(set(map(repr, draws))) == len(found), draws


def test_c1_what_a_rank_draws_does_not_depend_on_a_seed_in_the_notebook() -> None:
    import torch

    torch.manual_seed(0)
    numbers = []
    for _ in range(2):
        with WorkerPool(1, "cpu") as pool:
            numbers.append(pool.pull("__import__('torch').rand(1).item()").same())
    assert numbers[0] != numbers[1]


def test_c1_strings_hash_alike_on_all_ranks_and_numbers_repeat_after_a_seed() -> None:
    seeded = (
        "import torch, numpy as np\ntorch.manual_seed(3); np.random.seed(3)\n(torch.rand(1).item(), np.random.rand(), hash('a'))"
    )
    with WorkerPool(2, "cpu") as pool:
        before = value(pool, seeded).same()
        pool.restart()
        assert value(pool, seeded).same() == before


def test_c1_temporary_files_and_local_time_follow_the_notebooks_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = "import tempfile, time\n(tempfile.gettempdir(), time.strftime('%z', time.localtime(0)))"
    with WorkerPool(1, "cpu") as pool:
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        pool.restart()
        assert value(pool, cell).same() == (str(tmp_path), "+0900")


# ---- process groups --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(3, device="cpu", replace=True) as shared:
        shared.run_cell("import torch, torch.distributed as dist\nfrom datetime import timedelta\npair = dist.new_group([0, 2])")
        yield shared


BARRIERS = """
dist.monitored_barrier()
if rank != 1:
    dist.monitored_barrier(pair)
(dist.get_backend(), dist.get_backend(pair) if rank != 1 else "gloo")
"""


def test_p13_backend_is_gloo_and_monitored_barrier_works_on_subgroups_and_after_groups_were_rebuilt(pool: WorkerPool) -> None:
    assert value(pool, BARRIERS).same() == ("gloo", "gloo")
    with pytest.raises(RunTimeoutError):
        pool.run_cell("if rank: dist.barrier()", timeout_s=0.3)
    assert value(pool, BARRIERS, timeout_s=60).same() == ("gloo", "gloo")
    assert value(pool, "ones = torch.ones(1)\ndist.all_reduce(ones)\nones.item()").same() == 3.0


def test_p13_monitored_barrier_names_the_rank_that_does_not_come(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell("if rank != 2: dist.monitored_barrier(timeout=timedelta(seconds=0.5))", timeout_s=60)
    assert "Rank 2 failed to pass monitoredBarrier" in caught.value.failures[0].message
    assert value(pool, BARRIERS, timeout_s=60).same() == ("gloo", "gloo")


def test_p16_script_that_makes_the_default_group_is_told_that_it_exists(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run_cell("dist.init_process_group('gloo')")
    told = "Every rank of a pool has its default process group: leave out init_process_group here."
    assert caught.value.failures[0].traceback.splitlines()[-1] == told
    assert value(pool, BARRIERS).same() == ("gloo", "gloo")


# ---- as in a notebook and a terminal ---------------------------------------------------------------------------------


def test_p16_underscore_is_the_last_value_until_a_cell_sets_it(pool: WorkerPool) -> None:
    pool.run_cell("rank * 10")
    pool.run_cell("x = 1")
    pool.run_cell("rank;")
    assert value(pool, "_ + 1") == {0: 1, 1: 11, 2: 21}
    pool.run_cell("for _ in range(3): pass\n'shown'")
    assert value(pool, "_").same() == 2
    pool.run_cell("del _\nNone")


def sleepers(marker: str) -> list[psutil.Process]:
    return [item for item in psutil.process_iter(["cmdline"]) if marker in (item.info["cmdline"] or [])]


@pytest.mark.parametrize("command", ["sleep {0}; true", "(sleep {0}; sleep {0}); true", "exec sleep {0}"])
def test_p16_command_of_a_shell_ends_with_the_stopped_cell(pool: WorkerPool, command: str) -> None:
    marker = f"78.{os.getpid()}"
    pool.run_cell(f"import subprocess\nbackground = subprocess.Popen(['sleep', '{marker}1'])")
    with pytest.raises(RunTimeoutError):
        pool.run_cell(f"subprocess.run({command.format(marker)!r}, shell=True)", timeout_s=0.7)
    assert sleepers(marker) == []
    ended = "running = background.poll() is None\nbackground.kill(), background.wait(), subprocess.run('true')\nrunning"
    assert value(pool, ended).same() is True  # labkit does not touch a cell's own child in the background


# ---- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["DETAIL", "INFO", None])
def test_p16_debug_level_that_is_set_in_the_notebook_holds_in_the_next_pool(
    monkeypatch: pytest.MonkeyPatch, level: str | None
) -> None:
    if level is None:
        monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    else:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    with WorkerPool(2, "cpu", replace=True) as pool:
        pool.run_cell("import torch, torch.distributed as dist")
        assert value(pool, "dist.get_debug_level().name").same() == (level or "OFF")
        if level == "DETAIL":
            with pytest.raises(RankFailedError, match="Detected mismatch between collectives on ranks"):
                pool.run_cell("dist.all_reduce(torch.ones(1 + rank))", timeout_s=60)
        assert value(pool, "ones = torch.ones(1)\ndist.all_reduce(ones)\nones.item()", timeout_s=60).same() == 2.0
