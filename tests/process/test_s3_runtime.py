"""Seed rows S3.1 and S3.2: FSDP2 trains as FSDP1 did, and gathers and frees the same blocks in the same order."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import labkit
from labkit.errors import RunTimeoutError, WorkerDiedError
from labkit.spmd.model.transformer import Block, Transformer, next_token_loss
from labkit.spmd.shards.sharding import shard_model
from labkit.spmd.trace.events import Trace
from labkit.spmd.trace.recorder import record_events
from tests.matrix import matrix
from tests.process.s3_scenarios import (
    NUM_STEPS,
    SMALL,
    STRATEGIES,
    WRAPS,
    batches,
    mesh_of_all,
    small_model,
    traced,
    traced_fsdp1,
    traced_fsdp2,
    train_ddp,
    train_pair,
    train_single,
)

EVERY = ("root", "layers.0", "layers.1", "layers.2")
GROUPS = {"auto": EVERY, "manual": ("root", "layers.1")}


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def largest_gap_in_ulps(left: list[float], right: list[float]) -> float:
    """Return the largest difference in units of the last place of a float32 of that size."""
    return max(abs(a - b) / 2.0 ** (math.frexp(b)[1] - 24) for a, b in zip(left, right, strict=True))


def check_same_losses(pool: labkit.WorkerPool, left: list[float], right: list[float]) -> None:
    assert len(left) == NUM_STEPS
    assert left[-1] < left[0]
    if pool.world_size == 2:
        assert left == right  # two numbers add up to the same sum in either order
    else:
        # In which order gloo adds depends on an element's place in the buffer, and the buffers of FSDP1, FSDP2 and DDP differ.
        assert largest_gap_in_ulps(left, right) <= 8


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_s3_1_every_rank_sees_the_same_losses_with_fsdp1_and_fsdp2(pool: labkit.WorkerPool, wrap: str, strategy: str) -> None:
    for old, new in pool.run(train_pair, pool.device, wrap, strategy, "float32", timeout_s=90).values():
        check_same_losses(pool, new, old)


def test_s3_1_in_float64_the_gaps_of_float32_are_gone(pool: labkit.WorkerPool) -> None:
    for old, new in pool.run(train_pair, pool.device, "auto", "FULL_SHARD", "float64", timeout_s=90).values():
        assert new == pytest.approx(old, rel=1e-14, abs=0.0)


def test_s3_1_ddp_and_a_single_process_see_them_too(pool: labkit.WorkerPool) -> None:
    ddp = pool.run(train_ddp, pool.device, "float32", timeout_s=90)
    single = pool.run(train_single, pool.device, "float32", timeout_s=90)
    sharded = pool.run(train_pair, pool.device, "auto", "FULL_SHARD", "float32", timeout_s=90)
    for rank in range(pool.world_size):
        check_same_losses(pool, ddp[rank], single[rank])
        check_same_losses(pool, sharded[rank][1], single[rank])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_s3_2_blocks_are_gathered_and_freed_in_the_same_order(pool: labkit.WorkerPool, wrap: str, strategy: str) -> None:
    old = pool.run(traced_fsdp1, pool.device, wrap, strategy, timeout_s=90)
    new = pool.run(traced_fsdp2, pool.device, wrap, strategy, timeout_s=90)
    for rank in range(pool.world_size):
        assert [block.name for block in old[rank].blocks] == [block.name for block in new[rank].blocks] == list(GROUPS[wrap])
        if strategy == "NO_SHARD":
            # A replica is its own shard. FSDP2 still copies it for the computation, without any collective.
            assert old[rank].order() == ()
            assert new[rank].counts() == old[rank].counts() == {"all_reduce": len(GROUPS[wrap])}
        else:
            assert new[rank].order() == old[rank].order() == new[0].order()
            assert {name.split(" ")[1] for name in new[rank].order()} == set(GROUPS[wrap])
            assert new[rank].counts() == old[rank].counts()


def test_s3_2_the_order_is_the_one_that_the_notebook_explains(pool: labkit.WorkerPool) -> None:
    forward = ("U root", "U 0", "R 0", "U 1", "R 1", "U 2", "R 2")
    backward = ("U 2", "U 1", "R 2", "U 0", "R 1", "R 0", "R root")
    trace = pool.run(traced_fsdp2, pool.device, "auto", "FULL_SHARD", timeout_s=90)[0]
    assert trace.order(names=False, phase="forward") == forward
    assert trace.order(names=False, phase="backward") == backward
    without = pool.run(traced_fsdp1, pool.device, "auto", "FULL_SHARD", "none", timeout_s=90)[0]
    assert without.order(names=False, phase="backward") == ("U 2", "R 2", "U 1", "R 1", "U 0", "R 0", "R root")


class BlockDrop(Transformer):
    """The last rank runs its middle block without using the output: discarded, or in the graph with weight zero."""

    in_graph = False

    def forward(self, tokens: Tensor) -> Tensor:
        x, seq = self.embed(tokens), tokens.shape[1]
        for place, block in enumerate(self.layers):
            y = block(x, self.rope_cos[:seq], self.rope_sin[:seq])
            if place == 1 and dist.get_rank() == dist.get_world_size() - 1:
                x = x + 0 * y if self.in_graph else x
            else:
                x = y
        logits: Tensor = self.head(self.norm(x))
        return logits


def block_drop(in_graph: bool) -> BlockDrop:
    model = BlockDrop(SMALL)
    model.load_state_dict(small_model("cpu").state_dict())
    model.in_graph = in_graph
    shard_model(model, mesh_of_all("cpu"), blocks=Block)
    return model


def evaluated_without_its_output() -> Trace:
    model = block_drop(in_graph=False)
    with torch.no_grad(), record_events(model) as recording:
        next_token_loss(model, batches("cpu", 1)[0])
    return recording.trace()


def trained_with_weight_zero() -> Trace:
    return traced(block_drop(in_graph=True), "cpu")


def trained_without_its_output() -> None:
    next_token_loss(block_drop(in_graph=False), batches("cpu", 1)[0]).backward()


def test_an_output_that_one_rank_throws_away_keeps_the_ranks_in_step_without_backward(pool: labkit.WorkerPool) -> None:
    traces = pool.run(evaluated_without_its_output, timeout_s=90)
    assert {trace.order() for trace in traces.values()} == {traces[0].order()}
    assert all(trace.counts() == {"all_gather": 4} for trace in traces.values())


def test_a_block_with_weight_zero_keeps_the_ranks_in_step_through_backward(pool: labkit.WorkerPool) -> None:
    traces = pool.run(trained_with_weight_zero, timeout_s=90)
    assert {trace.order() for trace in traces.values()} == {traces[0].order()}
    assert all(trace.counts() == {"all_gather": 7, "reduce_scatter": 4} for trace in traces.values())


def test_backward_of_an_output_that_one_rank_throws_away_ends_a_rank_or_hangs(pool: labkit.WorkerPool) -> None:
    # If the others' reduction meets a smaller call of this rank, gloo ends the process.
    try:
        with pytest.raises((WorkerDiedError, RunTimeoutError), match=r"SIGABRT|did not finish"):
            pool.run(trained_without_its_output, timeout_s=10)
    finally:
        pool.restart()
