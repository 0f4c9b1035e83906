"""A rank is as a process under torchrun: its random numbers, its environment, the names of its process groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit import RankFailedError, RunTimeoutError, WorkerPool


def value(pool: WorkerPool, source: str, **options: Any) -> Any:
    """What a cell gives on each rank."""
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
