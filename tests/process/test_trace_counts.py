"""Collectives of a step, counted for every way to shard, and compared with torch's own counter if that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import labkit
from labkit.spmd.model.transformer import next_token_loss
from labkit.spmd.trace.collectives import count_collectives
from labkit.spmd.trace.events import UNSHARD, Trace
from labkit.spmd.trace.recorder import record_events
from tests.matrix import matrix
from tests.process.s3_scenarios import (
    batches,
    default,
    kept_after_forward,
    mesh_of_all,
    sharded,
    small_model,
    traced,
)


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def root_freed_too() -> Trace:
    model = small_model("cpu")
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh_of_all("cpu"), reshard_after_forward=True)
    return traced(model, "cpu")


def only_root() -> Trace:
    return traced(fully_shard(small_model("cpu"), mesh=mesh_of_all("cpu")), "cpu")


def only_blocks() -> Trace:
    model = small_model("cpu")
    for block in model.layers:
        fully_shard(block, mesh=mesh_of_all("cpu"))
    return traced(model, "cpu")


def accumulated(keep: bool) -> Trace:
    model = sharded()
    first, *others = batches("cpu", 3)
    next_token_loss(model, first).backward()
    with record_events(model) as recording:
        for last, batch in zip((False, True), others, strict=True):
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            if keep:
                model.set_reshard_after_backward(last)  # type: ignore[operator]
            next_token_loss(model, batch).backward()
    return recording.trace()


def accumulated_by_default() -> Trace:
    return accumulated(keep=False)


def accumulated_unsharded() -> Trace:
    return accumulated(keep=True)


@pytest.mark.parametrize(
    ("run", "gathers", "reductions"),
    [
        (default, 7, 4),
        (root_freed_too, 8, 4),
        (kept_after_forward, 4, 4),
        (only_root, 1, 1),
        (only_blocks, 3, 3),
        (accumulated_by_default, 14, 4),
        (accumulated_unsharded, 10, 4),
    ],
)
def test_collectives_of_a_step_are_counted(
    pool: labkit.WorkerPool, run: Callable[[], Trace], gathers: int, reductions: int
) -> None:
    for trace in pool.run(run, timeout_s=60).values():
        assert trace.counts() == {"all_gather": gathers, "reduce_scatter": reductions}
        assert trace.calls(UNSHARD)[1] == gathers
        assert trace.live_bytes()[-1] == 0


def counted_twice() -> tuple[dict[str, int], dict[str, int], str]:
    model = sharded()
    (batch,) = batches("cpu", 1)
    next_token_loss(model, batch).backward()
    with count_collectives() as log:
        next_token_loss(model, batch).backward()
    with CommDebugMode() as torchs:
        next_token_loss(model, batch).backward()
    try:
        with CommDebugMode():
            next_token_loss(model, batch).backward()
            next_token_loss(model, batch).backward()
    except IndexError as error:
        failure = type(error).__name__
    else:
        failure = ""
    return log.counts, {str(op): count for op, count in torchs.get_comm_counts().items()}, failure


def test_counts_agree_with_torch_s_own_where_it_counts(pool: labkit.WorkerPool) -> None:
    own, torchs, failure = pool.run(counted_twice).same()
    assert own == {"all_gather": 7, "reduce_scatter": 4}
    assert sorted(torchs.values()) == sorted(own.values())
    # The reason for our own counter. If torch's ever passes this, check whether ours is still needed.
    assert failure == "IndexError"


def every_kind() -> tuple[list[tuple[str, int, int]], list[tuple[str, int]]]:
    import torch.distributed._functional_collectives as functional

    world_size = dist.get_world_size()
    pairs = [dist.new_group([rank, rank + 1]) for rank in range(0, world_size, 2)]
    mine = pairs[dist.get_rank() // 2]
    four = torch.ones(4)
    with count_collectives() as log:
        dist.all_reduce(four)
        dist.all_gather([torch.empty(4) for _ in range(world_size)], four)
        dist.reduce_scatter(torch.empty(4), [four] * world_size)
        dist.broadcast(four, 0)
        dist.all_reduce(four, group=mine)
    with count_collectives() as functional_log:
        functional.all_reduce(four, "sum", mine).wait()  # type: ignore[attr-defined]
    return [(c.kind, c.size_bytes, c.group_size) for c in log.calls], [(c.kind, c.group_size) for c in functional_log.calls]


def test_bytes_are_those_of_the_whole_and_the_group_is_known(pool: labkit.WorkerPool) -> None:
    world_size = pool.world_size
    seen, functional = pool.run(every_kind).same()
    assert seen == [
        ("all_reduce", 16, world_size),
        ("all_gather", 16 * world_size, world_size),
        ("reduce_scatter", 16 * world_size, world_size),
        ("broadcast", 16, world_size),
        ("all_reduce", 16, 2),
    ]
    assert functional == [("all_reduce", 2)]
