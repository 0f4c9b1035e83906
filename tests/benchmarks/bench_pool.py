"""The pool against ipyparallel and torch.multiprocessing.spawn, all in one run on one machine.

Every comparison is a ratio of medians measured in this run; absolute times depend on what else the machine does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import labkit
from tests.benchmarks.table import Figures, seconds, show_seconds

WORLD_SIZE = 4
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_composable_checkpointing.ipynb"
ALL_REDUCE = "import torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)"
PARTS = "torch, torch.distributed.tensor, torch.distributed.fsdp, torch.distributed.checkpoint.state_dict, torch._dynamo"


@pytest.fixture(scope="module")
def figures() -> Iterator[Figures]:
    gathered = Figures("Pool against others")
    yield gathered
    gathered.finish()


def all_reduce_in_group(rank: int, world_size: int, path: str) -> None:
    """Get to the first all-reduce in a spawned or ipyparallel process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def open_pool() -> labkit.WorkerPool:
    pool = labkit.WorkerPool(WORLD_SIZE, device="cpu", replace=True)
    pool.run_cell(ALL_REDUCE)
    return pool


def spawn_and_reduce(path: str) -> None:
    import torch.multiprocessing as mp

    mp.spawn(all_reduce_in_group, args=(WORLD_SIZE, path), nprocs=WORLD_SIZE)


def test_second_pool_to_first_all_reduce(figures: Figures, tmp_path: Path) -> None:
    open_pool().close()
    ours = []
    for _ in range(7):
        began = time.perf_counter()
        pool = open_pool()
        ours.append(time.perf_counter() - began)
        pool.close()
    labkit_s = sorted(ours)[len(ours) // 2]
    spawn_s = seconds(lambda: spawn_and_reduce(str(tmp_path / f"store{time.monotonic_ns()}")), 2)
    ipp_s = start_ipyparallel(str(tmp_path / "ipp-store"))
    for name, other in (("torch.multiprocessing.spawn", spawn_s), ("ipyparallel", ipp_s)):
        ratio = f"{name}: {show_seconds(other)}, {other / labkit_s:.0f} times as long"
        figures.add("second pool of 4 to the first all-reduce", show_seconds(labkit_s), ratio, "50 times")


def start_ipyparallel(path: str) -> float:
    import ipyparallel as ipp

    began = time.perf_counter()
    with ipp.Cluster(n=WORLD_SIZE, log_level=40) as client:
        view = client[:]
        view.scatter("rank", list(range(WORLD_SIZE)), flatten=True, block=True)
        view.push({"world_size": WORLD_SIZE, "path": path}, block=True)
        view.execute(
            "import torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo', store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)\n"
            "dist.all_reduce(torch.ones(1))",
            block=True,
        )
        return time.perf_counter() - began


def test_first_pool_against_its_imports(figures: Figures) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    pool = f"import labkit\np = labkit.WorkerPool({WORLD_SIZE}, 'cpu')\np.run_cell({ALL_REDUCE!r})\nimport os; os._exit(0)"
    run = {
        "imports": lambda: subprocess.run([sys.executable, "-c", f"import {PARTS}"], check=True, env=environ),
        "pool": lambda: subprocess.run([sys.executable, "-c", pool], check=True, env=environ),
    }
    taken = {name: [] for name in run}
    for _ in range(3):
        for name, action in run.items():
            taken[name].append(seconds(action))
    imports_s, pool_s = min(taken["imports"]), min(taken["pool"])
    against = f"import of {PARTS}: {show_seconds(imports_s)}, ratio {pool_s / imports_s:.2f}"
    figures.add("first pool of 4 to the first all-reduce, fresh process", show_seconds(pool_s), against, "1.3 times")


def test_empty_call_and_cell(figures: Figures) -> None:
    import ipyparallel as ipp
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    labkit.load_ipython_extension(shell)
    with open_pool() as pool:
        call_s = seconds(lambda: pool.run(int), 300)
        cell_s = seconds(lambda: shell.run_cell("%%spmd\npass"), 300)
    with ipp.Cluster(n=WORLD_SIZE, log_level=40) as client:
        view = client[:]
        view.apply_sync(int)
        ipp_call_s = seconds(lambda: view.apply_sync(int), 60)
        ipp_cell_s = seconds(lambda: view.execute("pass", block=True), 60)
    for what, ours, other, aim in (
        ("empty call on 4 ranks", call_s, ipp_call_s, "1 ms"),
        ("empty %%spmd cell on 4 ranks", cell_s, ipp_cell_s, "2.5 ms, 10 times"),
    ):
        against = f"ipyparallel: {show_seconds(other)}, {other / ours:.0f} times as long"
        figures.add(what, show_seconds(ours), against, aim)


def test_push_and_pull_of_256_mib(figures: Figures) -> None:
    import torch

    tensor = torch.ones(64 << 20)
    copy_s = seconds(tensor.clone, 5)
    with open_pool() as pool:
        push_s = seconds(lambda: pool.push(tensor=tensor), 5)
        read_s = seconds(lambda: pool.run_cell("tensor.sum()\nNone"), 3)
        pull_s = seconds(lambda: pool.pull("tensor", ranks=0), 5)
    for what, value in (("push of 256 MiB to 4 ranks", push_s), ("pull of 256 MiB from 1 rank", pull_s)):
        against = f"one copy in memory: {show_seconds(copy_s)}, ratio {value / copy_s:.1f}"
        figures.add(what, show_seconds(value), against, "3 times")
    figures.add("the 4 ranks then read it (sum)", show_seconds(read_s), "the pages are mapped at this first reading")


def test_printed_lines_take_linear_time(figures: Figures, capsys: pytest.CaptureFixture[str]) -> None:
    with open_pool() as pool:
        taken = {
            count: seconds(lambda count=count: pool.run_cell(f"for i in range({count}): print(i)", ranks=0))
            for count in (1000, 10_000)
        }
    capsys.readouterr()
    ratio = taken[10_000] / taken[1000]
    figures.add(
        "10,000 printed lines",
        show_seconds(taken[10_000]),
        f"1,000 lines: {show_seconds(taken[1000])}, ratio {ratio:.1f}",
        "linear",
    )


def test_kernel_memory_over_2000_results(figures: Figures) -> None:
    process = psutil.Process()
    with open_pool() as pool:
        sizes = []
        for number in range(2000):
            pool.run_cell("b'x' * 2**20", want_value=True, ranks=0)
            if number % 500 == 499:
                sizes.append(process.memory_info().rss / 2**20)
    figures.add("kernel memory after 500 and 2,000 cells of 1 MB", f"{sizes[0]:.0f} MiB, {sizes[-1]:.0f} MiB", "", "flat")


@pytest.mark.timeout(600)
def test_notebook_01(figures: Figures, tmp_path: Path) -> None:
    import papermill

    if not NOTEBOOK.exists():
        pytest.skip("notebook 01 is not there")
    taken = seconds(
        lambda: papermill.execute_notebook(
            NOTEBOOK,
            tmp_path / "01.ipynb",
            parameters={"world_size": 4, "device": "cpu"},
            progress_bar=False,
            cwd=NOTEBOOK.parent,
            execution_timeout=300,
        )
    )
    figures.add("notebook 01 with 4 ranks, kernel start included", show_seconds(taken), "", "60 s")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["local", "agents"])
def test_empty_cell_on_64_ranks(figures: Figures, launcher: str) -> None:
    began = time.perf_counter()
    with labkit.WorkerPool(64, "cpu", launcher=launcher, replace=True) as pool:  # type: ignore[arg-type]
        start_s = time.perf_counter() - began
        taken = seconds(lambda: pool.run_cell("pass"), 50)
    figures.add(
        f"empty cell on 64 ranks, {launcher}", show_seconds(taken), f"start of that pool: {show_seconds(start_s)}", "100 ms"
    )
