"""Notebook 00's checks accept the solutions that stand in the notebook and refuse the usual wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import labkit
from labkit.course import lab00
from labkit.errors import ExerciseError, RankFailedError
from tests.notebooks.exercises import exercise_cell

NOTEBOOK = "00_start_here"
IMPORTS = "import torch\nimport torch.distributed as dist\n"
LOSSES = "losses = torch.full((rank + 1,), float(rank), device=device)\n"
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(4, device="cpu") as pool:
        yield pool


def run_cell(pool: labkit.WorkerPool, source: str) -> None:
    pool.run_cell(IMPORTS + source)


def solution(marker: str) -> str:
    return exercise_cell(NOTEBOOK, marker)


def check_log_mean(pool: labkit.WorkerPool) -> str:
    return lab00.check_log_mean(pool, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("marker", "check", "verdict"),
    [
        ("mean_loss", lab00.check_mean_loss, "Solved: mean_loss is 2 on ranks 0-3, the mean of 10 losses."),
        ("my_all_reduce", lab00.check_my_all_reduce, "one reduce-scatter and one all-gather"),
        ("log_mean", check_log_mean, "Solved: rank 0 got 277.75, the others got None"),
    ],
)
def test_the_notebooks_solution_passes(pool: labkit.WorkerPool, marker: str, check: Callable[..., str], verdict: str) -> None:
    run_cell(pool, solution(marker))
    assert verdict in check(pool)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("mean_loss = 2.0", r"mean_loss is a float, 2.0 on rank 0(.|\n)*a tensor with one number"),
        ("mean_loss = losses.mean()", "0 on rank 0, 2 too small(.|\n)*Every rank needs the value"),
        (
            "mean_loss = losses.mean(); dist.all_reduce(mean_loss); mean_loss /= world_size",
            r"1.5 on rank 0, 0.5 too small(.|\n)*Target: 2 on ranks 0-3(.|\n)*mean of the ranks' means",
        ),
        ("mean_loss = losses.sum(); dist.all_reduce(mean_loss)", "18 too large(.|\n)*the sum of all losses"),
        ("mean_loss = losses.sum(); dist.all_reduce(mean_loss); mean_loss /= losses.numel()", "20 on rank 0"),
        (
            "s = torch.tensor([losses.sum(), losses.numel()]); dist.reduce(s, 0); mean_loss = s[0] / s[1]",
            "on rank 1(.|\n)*Every rank needs the value",
        ),
    ],
)
def test_wrong_mean_loss_is_refused_with_its_distance(pool: labkit.WorkerPool, wrong: str, reason: str) -> None:
    run_cell(pool, LOSSES + wrong)
    with pytest.raises(ExerciseError, match=reason):
        lab00.check_mean_loss(pool)


MY_ALL_REDUCE = """
def my_all_reduce(t):
    chunks = list(t.chunk(world_size))
    summed = torch.empty_like(chunks[0])
    dist.reduce_scatter(summed, chunks)
    gathered = [torch.empty_like(summed) for _ in chunks]
    dist.all_gather(gathered, summed)
    return torch.cat(gathered)
"""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("return torch.cat(gathered)", "return summed", "It has to be a tensor of 12 numbers"),
        ("return torch.cat(gathered)", "pass", "returned None on rank 0"),
        ("return torch.cat(gathered)", "return torch.cat(gathered[::-1])", "first difference is at position 0"),
        ("return torch.cat(gathered)", "return torch.cat(gathered) / world_size", "first difference"),
        ("return torch.cat(gathered)", "t.copy_(torch.cat(gathered)); return t", "the input has become"),
        ("return torch.cat(gathered)", "dist.all_reduce(t); return t", "the input has become"),
        ("    chunks =", "    t = t.clone(); dist.all_reduce(t); return t\n    chunks =", "called these collectives: 1 all-reduce"),
        (
            "    chunks =",
            "    rows = [torch.empty_like(t) for _ in range(world_size)]\n"
            "    dist.all_gather(rows, t); return torch.stack(rows).sum(0)\n    chunks =",
            "called these collectives: 1 all-gather.\nTarget: 1 reduce-scatter",
        ),
        ("t.chunk(world_size)", "t.flip(0).chunk(world_size)", "first difference"),
    ],
)
def test_wrong_my_all_reduce_is_refused(pool: labkit.WorkerPool, old: str, new: str, reason: str) -> None:
    run_cell(pool, MY_ALL_REDUCE)
    lab00.check_my_all_reduce(pool)
    mutant = MY_ALL_REDUCE.replace(old, new)
    assert mutant != MY_ALL_REDUCE
    run_cell(pool, mutant)
    with pytest.raises(ExerciseError, match=reason):
        lab00.check_my_all_reduce(pool)


@pytest.mark.parametrize(
    "body",
    [
        "g = [torch.empty(t.numel() // world_size) for _ in range(world_size)]; s = torch.empty_like(g[0])\n"
        "    dist.reduce_scatter_tensor(s, t); dist.all_gather(g, s); return torch.cat(g)",
        "c = list(t.chunk(world_size)); s = c[0].clone(); dist.reduce_scatter(s, [x.clone() for x in c])\n"
        "    out = torch.empty_like(t); dist.all_gather_into_tensor(out, s); return out",
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_other_right_ways_to_write_my_all_reduce_pass(pool: labkit.WorkerPool, body: str) -> None:
    run_cell(pool, f"def my_all_reduce(t):\n    {body}\n")
    assert lab00.check_my_all_reduce(pool).startswith("Solved")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "if rank == 0:\n        dist.all_reduce(loss); return loss.item() / world_size",
            "log_mean hangs(.|\n)*Every rank has to make",
        ),
        ("dist.all_reduce(loss); return loss.item() / world_size if rank == 0 else None", "rank 0 the input has become"),
        ("t = loss.clone(); dist.all_reduce(t); return t.item() / world_size", "on rank 1.\nTarget: None there"),
        (
            "t = loss.clone(); dist.all_reduce(t); return t.item() if rank == 0 else None",
            "returned 1111.0 on rank 0.\nTarget: 277.75",
        ),
        ("return loss.item() if rank == 0 else None", "returned 1.0 on rank 0"),
        ("t = loss.clone(); dist.all_reduce(t)", "returned None on rank 0"),
    ],
)
def test_wrong_log_mean_is_refused_and_a_hang_is_explained(pool: labkit.WorkerPool, body: str, reason: str) -> None:
    run_cell(pool, f"def log_mean(loss):\n    {body}\n")
    with pytest.raises(ExerciseError, match=reason):
        check_log_mean(pool)
    run_cell(pool, solution("log_mean"))
    assert check_log_mean(pool)  # the pool lives on, also after the hang


@pytest.mark.parametrize("check", [lab00.check_mean_loss, lab00.check_my_all_reduce, check_log_mean])
def test_a_check_before_its_exercise_says_what_is_missing(pool: labkit.WorkerPool, check: Callable[..., str]) -> None:
    pool.run_cell("for name in ('mean_loss', 'my_all_reduce', 'log_mean'):\n    globals().pop(name, None)")
    with pytest.raises(ExerciseError, match=r"there is no \w+ on ranks 0-3 yet"):
        check(pool)


def test_checks_leave_torch_distributed_as_it_was(pool: labkit.WorkerPool) -> None:
    identities = "[id(getattr(dist, name)) for name in ('all_reduce', 'all_gather', 'reduce_scatter')]"
    run_cell(pool, MY_ALL_REDUCE.replace("return torch", "raise ValueError('no'); return torch"))
    before = pool.pull(identities)
    with pytest.raises(RankFailedError):
        lab00.check_my_all_reduce(pool)
    assert pool.pull(identities) == before
