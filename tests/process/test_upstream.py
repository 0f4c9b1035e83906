"""PyTorch's own distributed test bodies get the same verdicts on the ranks of a pool as in plain processes.

The bodies are those of the installed torch. ``upstream_verdicts.toml`` names those that do not pass, with the reason; every other
body has to pass. ``python -m tests.process.upstream_plain`` measures them without labkit.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from labkit import RankFailedError, RunTimeoutError, WorkerDiedError, WorkerPool
from labkit.errors import OpenCollectiveError, RunReport
from tests.process import upstream, upstream_list
from tests.process.upstream import LIMIT_S, OUT_OF_STEP, WORLD_SIZE, Verdict
from tests.process.upstream_list import Expected

ROOT = Path(__file__).parents[2]
KINDS = {OpenCollectiveError: "reported", RunTimeoutError: "hangs", WorkerDiedError: "dies"}


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """A pool that no other test uses: bodies leave many groups behind."""
    listed("pool")  # before a pool is started for nothing
    with WorkerPool(WORLD_SIZE, device="cpu", replace=True) as own:
        yield own


def listed(where: str) -> Expected:
    """Return the list for the torch here, or skip the test."""
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("torch's test bodies import expecttest, which is not installed; it is in the extra `dev`")
    found = upstream_list.expected(torch.__version__, cuda_build=torch.version.cuda is not None, where=where)
    if found is None:
        pytest.skip(f"no verdicts were measured for torch {torch.__version__}: run python -m tests.process.upstream_plain")
    return found


def on_pool(pool: WorkerPool, name: str, restart: bool, folder: Path) -> Verdict:
    """Run one body on the pool, then the next collective; restart the pool after a death, or where the body is known to need it."""
    try:
        pool.run(upstream.run_body, name, str(folder), timeout_s=LIMIT_S)
        verdict = upstream.judge(folder)
    except RankFailedError as error:
        verdict = upstream.judge(folder)
        if verdict.kind == "dies":
            verdict = Verdict("fails", str(error))  # before or after the body
    except RunReport as error:
        verdict = Verdict(KINDS.get(type(error), "fails"), str(error).splitlines()[0])
    if restart or pool.dead_ranks:
        pool.restart()
    elif not works(pool):
        # A collective that fails makes labkit renew the groups.
        assert works(pool), f"the pool does not work after {name}, which {verdict!s}"
        verdict = Verdict(verdict.kind, "; ".join(filter(None, (verdict.says, OUT_OF_STEP))))
    return verdict


def works(pool: WorkerPool) -> bool:
    """Return whether the next collective is right on all ranks, and their counters of groups are equal."""
    try:
        told = pool.run(upstream.next_collective, timeout_s=30)
    except RunReport:
        return False
    assert len({count for _, count in told.values()}) == 1, told
    return all(right for right, _ in told.values())


def check_on_pool(pool: WorkerPool, expected: Expected, chosen: Iterable[str]) -> None:
    """Run bodies on the pool; fail where a verdict is a surprise, or where the pool does not work or has lost a rank.

    That no process is left is seen by the guard around each test.
    """
    found = upstream.verdicts(lambda name, folder: on_pool(pool, name, name in expected.restart_after, folder), chosen)
    assert works(pool)
    assert pool.dead_ranks == ()
    surprises = expected.surprises(found)
    assert not surprises, "\n".join(surprises)


def test_quick_bodies_pass_on_a_pool(pool: WorkerPool) -> None:
    expected = listed("pool")
    assert {expected.of(name).kind for name in expected.quick} == {"passes"}
    check_on_pool(pool, expected, expected.quick)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_body_gets_the_listed_verdict_on_a_pool(pool: WorkerPool) -> None:
    expected = listed("pool")
    names = pool.run(upstream.names, ranks=0)[0]
    assert expected.unknown(names) == []
    check_on_pool(pool, expected, [name for name in names if name not in expected.left_out])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_body_gets_the_listed_verdict_in_plain_processes() -> None:
    expected = listed("plain")
    told = subprocess.run(
        [sys.executable, "-m", "tests.process.upstream_plain", "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    found = {name: Verdict(*verdict) for name, verdict in json.loads(told.stdout).items() if name not in expected.left_out}
    surprises = expected.surprises(found)
    assert not surprises, "\n".join(surprises)


def test_a_surprise_in_either_direction_is_named_with_both_verdicts() -> None:
    error = Verdict("fails", "ValueError: no")
    expected = Expected({"a": error, "b": error, "c": error, "d": Verdict("varies", "no")}, frozenset(), (), frozenset())
    right = {"a": error, "d": Verdict("passes"), "e": Verdict("passes")}
    wrong = {"b": Verdict("passes"), "c": Verdict("fails", "KeyError: 3"), "d": Verdict("hangs")}
    wrong["f"] = Verdict("passes", OUT_OF_STEP)
    assert expected.surprises(right) == []
    assert expected.surprises(wrong) == [
        "b: expected fails: ValueError: no; got passes",
        "c: expected fails: ValueError: no; got fails: KeyError: 3",
        "d: expected varies: no; got hangs",
        f"f: expected passes; got passes: {OUT_OF_STEP}",
    ]
    assert expected.unknown(["a", "b", "c"]) == [f"d: listed in {upstream_list.FILE.name}, and no body of this torch"]
