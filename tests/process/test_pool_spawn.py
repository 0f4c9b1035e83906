"""If forking is not safe, workers start as fresh processes; the contract is the same, only the start takes longer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from labkit import RankFailedError, WorkerDiedError, WorkerPool
from labkit.controller.start.launchers.spawn import SpawnLauncher


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_START", "spawn")
        patch.setenv("LABKIT_PROBE", "inherited")
        with WorkerPool(2, "cpu", replace=True) as shared:
            yield shared


def test_workers_are_fresh_processes_of_the_notebook_itself(pool: WorkerPool) -> None:
    assert isinstance(pool._life.site._launcher, SpawnLauncher)
    for pid in pool.pids.values():
        assert psutil.Process(pid).ppid() == os.getpid()


def test_values_and_collectives_work(pool: WorkerPool) -> None:
    large = torch.arange(300_000.0)
    pool.push(large=large)

    def total(factor: int) -> float:
        import torch.distributed as dist

        mine = large_on_rank() * factor * (dist.get_rank() + 1)
        dist.all_reduce(mine)
        return float(mine[10])

    def large_on_rank() -> Any:
        import __main__

        return __main__.large

    assert pool.run(total, 2).same() == 10.0 * 2 * 3
    assert torch.equal(pool.pull("large")[1], large)


def test_environment_folder_and_place_are_taken_over(pool: WorkerPool) -> None:
    cell = "import os\n(os.environ['LABKIT_PROBE'], os.getcwd(), int(os.environ['RANK']) - rank, int(os.environ['WORLD_SIZE']))"
    assert pool.run_cell(cell, want_value=True).same() == ("inherited", os.getcwd(), 0, 2)  # type: ignore[union-attr]


def test_output_of_python_c_and_children_is_shown(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run_cell(
        "import ctypes, os, sys\nprint('python', rank)\nprint('error', rank, file=sys.stderr)\n"
        "_ = ctypes.CDLL(None).printf(b'c\\n')\n_ = os.system('echo child')"
    )
    out, err = capsys.readouterr()
    for rank in range(2):
        for text in (f"python {rank}", "c", "child"):
            assert f"[rank {rank}] {text}\n" in out
        assert f"[rank {rank}] error {rank}\n" in err


def test_errors_are_reported_and_the_ranks_live_on(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError, match="ranks 0-1: ZeroDivisionError") as caught:
        pool.run_cell("1 / 0", cell_number=5)
    assert "Cell In[5], line 1" in caught.value.failures[0].traceback
    assert pool.run(lambda: 1).same() == 1


def test_dataset_of_a_cell_feeds_a_dataloader_with_workers(pool: WorkerPool) -> None:
    cell = (
        "import pickle, torch\nfrom torch.utils.data import DataLoader, Dataset\n"
        "class Squares(Dataset):\n    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, index):\n        return torch.tensor(index ** 2)\n"
        "type(pickle.loads(pickle.dumps(Squares()))) is Squares, [int(x) for x in DataLoader(Squares(), num_workers=2)]"
    )
    assert pool.run_cell(cell, want_value=True).same() == (True, [0, 1, 4, 9])  # type: ignore[union-attr]


def test_death_is_reported_and_restart_is_the_way_back(pool: WorkerPool) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell("import os\nif rank == 1:\n    print('last words', flush=True)\n    os._exit(3)")
    (death,) = [failure for failure in caught.value.failures if failure.kind == "died"]
    assert (death.rank, death.exitcode) == (1, 3)
    assert "last words" in death.last_output
    pool.restart()
    assert pool.run(lambda: 1).same() == 1


def test_closing_leaves_no_process(pool: WorkerPool) -> None:
    pids = list(pool.pids.values())
    pool.close()
    assert not any(map(psutil.pid_exists, pids))
    assert not pool._life.site._launcher._running  # type: ignore[attr-defined]
