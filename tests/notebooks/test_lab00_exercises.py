"""Notebook 00's checks accept the notebook's own solutions and refuse the usual wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import labkit
from labkit.course.labs import lab00
from labkit.errors import ExerciseError
from tests.notebooks.exercises import exercise_cell

NOTEBOOK = "00_start_here"
IMPORTS = "import torch\nimport torch.distributed as dist\n"
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(4, device="cpu") as pool:
        yield pool


def run_cell(pool: labkit.WorkerPool, source: str) -> None:
    pool.run_cell(IMPORTS + source)


def solution(marker: str) -> str:
    return exercise_cell(NOTEBOOK, marker)


def check_mean_loss(pool: labkit.WorkerPool) -> str:
    return lab00.check_mean_loss(pool, timeout_s=TIMEOUT_S)


def check_my_all_reduce(pool: labkit.WorkerPool) -> str:
    return lab00.check_my_all_reduce(pool, timeout_s=TIMEOUT_S)


def check_log_mean(pool: labkit.WorkerPool) -> str:
    return lab00.check_log_mean(pool, timeout_s=TIMEOUT_S)


CHECKS = {"mean_loss": check_mean_loss, "my_all_reduce": check_my_all_reduce, "log_mean": check_log_mean}
VERDICTS = {
    "mean_loss": "Solved: mean_loss is 2 on ranks 0-3, the mean of 10 losses.",
    "my_all_reduce": "one reduce-scatter and one all-gather",
    "log_mean": "Solved: rank 0 got 277.75, the others got None",
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_notebooks_solution_passes(pool: labkit.WorkerPool, name: str) -> None:
    run_cell(pool, solution(f"def {name}"))
    assert VERDICTS[name] in CHECKS[name](pool)


def test_the_mean_may_be_divided_before_or_after_the_sum(pool: labkit.WorkerPool) -> None:
    for body in (
        "n = torch.tensor(float(losses.numel())); dist.all_reduce(n); m = losses.sum() / n; dist.all_reduce(m); return m",
        "s = torch.stack([losses.sum(), torch.tensor(float(len(losses)))]); dist.all_reduce(s); return (s[0] / s[1]).reshape(1)",
    ):
        run_cell(pool, f"def mean_loss(losses):\n    {body}\n")
        assert check_mean_loss(pool).startswith("Solved")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 2.0", r"mean_loss is a float, 2.0 on rank 0(.|\n)*a tensor with one number(.|\n)*without .item"),
        ("return 'two'", r"mean_loss is a str, 'two' on rank 0(.|\n)*A collective works on tensors"),
        ("pass", "mean_loss is None on rank 0(.|\n)*has to return the mean"),
        ("return torch.tensor(2.0)", "asked for other losses, is(.|\n)*Compute it from `losses`"),
        ("return torch.tensor(float('nan'))", r"is a tensor \[nan\] on rank 0\.\n"),
        (
            "m = losses.mean(); dist.all_reduce(m); return m / (world_size - 1)",
            "asked for other losses, is(.|\n)*Compute it from `losses`",
        ),
        ("return losses", r"mean_loss is a tensor \[1, 1\] on rank 1(.|\n)*one number"),
        ("return losses.mean()", r"\[0\] on rank 0, 2 too small(.|\n)*mean of the rank's own losses"),
        (
            "m = losses.mean(); dist.all_reduce(m); return m / world_size",
            r"\[1.5\] on rank 0, 0.5 too small(.|\n)*2, on ranks 0-3(.|\n)*mean of the ranks' means",
        ),
        ("s = losses.sum(); dist.all_reduce(s); return s", "18 too large(.|\n)*the sum of all losses. How many"),
        ("s = losses.sum(); dist.all_reduce(s); return s / world_size", "3 too large(.|\n)*over the number of ranks"),
        ("s = losses.sum(); dist.all_reduce(s); return s / losses.numel()", r"\[20\] on rank 0"),
        (
            "s = torch.tensor([losses.sum(), losses.numel()]); dist.reduce(s, 0); return s[0] / s[1]",
            "on rank 1(.|\n)*Every rank needs the value",
        ),
        ("if rank == 0:\n        dist.all_reduce(losses)\n    return losses.sum()", "mean_loss hangs(.|\n)*Every rank has to make"),
        (
            "return loses.mean()",
            r"mean_loss\(tensor\(\[0\.\]\)\) raised NameError: name 'loses' is not defined, in the line 'return loses.mean\(\)'",
        ),
        ("raise NotImplementedError", "mean_loss is not solved yet"),
    ],
)
def test_wrong_mean_loss_is_refused_with_its_distance(pool: labkit.WorkerPool, body: str, reason: str) -> None:
    run_cell(pool, f"def mean_loss(losses):\n    {body}\n")
    with pytest.raises(ExerciseError, match=reason):
        check_mean_loss(pool)


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
        ("return torch.cat(gathered)", "return gathered", r"returned a list, \[tensor(.|\n)*torch.cat joins them into one tensor"),
        (
            "return torch.cat(gathered)",
            "return torch.stack(gathered)",
            r"of shape \(4, 3\)(.|\n)*torch.stack makes rows of pieces",
        ),
        ("return torch.cat(gathered)", "return torch.cat(gathered).tolist()", "returned a list(.|\n)*torch.cat"),
        ("    chunks =", "    if rank == 0: dist.all_reduce(t)\n    return t\n    chunks =", "hangs(.|\n)*Every rank has to make"),
        ("    chunks =", "    raise NotImplementedError\n    chunks =", "my_all_reduce is not solved yet"),
        ("t.chunk(world_size)", "t.chnk(world_size)", "raised AttributeError(.|\n)*in the line 'chunks = list"),
        ("return torch.cat(gathered)", "return summed", "This is one piece. It has to be a tensor of 12 numbers"),
        ("return torch.cat(gathered)", "pass", "returned None on rank 0(.|\n)*has to return the sum"),
        ("return torch.cat(gathered)", "return torch.cat(gathered[::-1])", "first difference is at position 0"),
        ("return torch.cat(gathered)", "return torch.cat(gathered) / world_size", "This is the mean"),
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
    check_my_all_reduce(pool)
    mutant = MY_ALL_REDUCE.replace(old, new)
    assert mutant != MY_ALL_REDUCE
    run_cell(pool, mutant)
    with pytest.raises(ExerciseError, match=reason):
        check_my_all_reduce(pool)


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
    assert check_my_all_reduce(pool).startswith("Solved")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "if rank == 0:\n        dist.all_reduce(loss); return loss.item() / world_size",
            "log_mean hangs(.|\n)*Every rank has to make",
        ),
        ("dist.all_reduce(loss); return loss.item() / world_size if rank == 0 else None", "rank 0 the input has become"),
        (
            "t = loss.clone(); dist.all_reduce(t); return t.item() / world_size",
            "on rank 1.\nTarget: None there(.|\n)*Only rank 0 returns",
        ),
        (
            "t = loss.clone(); dist.all_reduce(t); return str(t.item() / world_size)",
            "a str, '277.75' on rank 0(.|\n)*Return a number",
        ),
        ("t = loss.clone(); dist.all_reduce(t); return t / world_size", r"a tensor \[277.75\] on rank 0(.|\n)*still a tensor"),
        ("return losss.item()", "raised NameError"),
        (
            "t = loss.clone(); dist.all_reduce(t); return t.item() if rank == 0 else None",
            "returned a float, 1111.0 on rank 0.\nTarget: the number 277.75(.|\n)*the sum over the ranks",
        ),
        ("return loss.item() if rank == 0 else None", "a float, 1.0 on rank 0(.|\n)*rank 0's own loss"),
        ("return loss.item() / world_size if rank == 0 else None", "own loss, divided"),
        ("t = loss.clone(); dist.all_reduce(t)", "returned None on rank 0(.|\n)*rank 0 needs the mean"),
    ],
)
def test_wrong_log_mean_is_refused_and_a_hang_is_explained(pool: labkit.WorkerPool, body: str, reason: str) -> None:
    run_cell(pool, f"def log_mean(loss):\n    {body}\n")
    with pytest.raises(ExerciseError, match=reason):
        check_log_mean(pool)
    run_cell(pool, solution("log_mean"))
    assert check_log_mean(pool)  # the pool lives on, also after the hang


@pytest.mark.parametrize("check", CHECKS.values())
def test_a_check_before_its_exercise_says_what_is_missing(pool: labkit.WorkerPool, check: Callable[..., str]) -> None:
    pool.run_cell("for name in ('mean_loss', 'my_all_reduce', 'log_mean'):\n    globals().pop(name, None)")
    with pytest.raises(ExerciseError, match=r"there is no \w+ on ranks 0-3 yet"):
        check(pool)


def test_checks_leave_torch_distributed_as_it_was(pool: labkit.WorkerPool) -> None:
    identities = "[id(getattr(dist, name)) for name in ('all_reduce', 'all_gather', 'reduce_scatter')]"
    run_cell(pool, MY_ALL_REDUCE.replace("return torch", "raise ValueError('no'); return torch"))
    before = pool.pull(identities)
    with pytest.raises(ExerciseError, match="ValueError: no"):
        check_my_all_reduce(pool)
    assert pool.pull(identities) == before


def test_one_rank_is_enough() -> None:
    with labkit.WorkerPool(1, device="cpu", replace=True) as pool:  # the last test: it closes the pool of the others
        for name, check in CHECKS.items():
            run_cell(pool, solution(f"def {name}"))
            assert check(pool).startswith("Solved")
