"""Claims of notebook 02 about torch. If a new torch fails one of these tests, the sentence in the notebook is wrong too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh

import labkit
from labkit.spmd.memory.timeline import MemoryTimeline, record_memory
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import Block, ModelConfig, next_token_loss
from labkit.spmd.shards.sharding import shard_model
from tests.matrix import matrix

NUM_BLOCKS = 2


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def recorded(num_recomputed: int, seq_len: int) -> MemoryTimeline:
    """The second step of the notebook's model, as torch's tracker follows it. Every rank has two sequences."""
    config = ModelConfig(dim=64, num_layers=NUM_BLOCKS, hidden_dim=192, max_seq_len=seq_len)
    model = build_model(config)
    for block in list(model.layers)[:num_recomputed]:
        checkpoint(block)
    shard_model(model, init_device_mesh("cpu", (dist.get_world_size(),)), blocks=Block)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = next(BatchSampler(batch_size=2 * world_size, seq_len=seq_len, rank=rank, world_size=world_size))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step() -> None:
        next_token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return record_memory(model, optimizer, (batch,), step, {str(place): block for place, block in enumerate(model.layers)})


def phase_of_the_peak(timeline: MemoryTimeline) -> tuple[str, str]:
    mark = [mark for mark in timeline.marks if mark.at <= timeline.peak_at][-1]
    return mark.phase, mark.block


def test_where_the_peak_is_a_block_s_recomputing_the_last_one_too_changes_not_a_byte(pool: labkit.WorkerPool) -> None:
    last_kept = pool.run(recorded, NUM_BLOCKS - 1, 32, timeout_s=60)
    last_too = pool.run(recorded, NUM_BLOCKS, 32, timeout_s=60)
    for rank in range(pool.world_size):
        assert phase_of_the_peak(last_kept[rank])[0] == "backward"
        assert last_kept[rank].peak == last_too[rank].peak


def test_where_the_peak_is_the_head_s_recomputing_the_last_block_too_lowers_it(pool: labkit.WorkerPool) -> None:
    last_kept = pool.run(recorded, NUM_BLOCKS - 1, 256, timeout_s=60)
    last_too = pool.run(recorded, NUM_BLOCKS, 256, timeout_s=60)
    for rank in range(pool.world_size):
        # The head and the loss run after the last block's forward has begun, and no mark separates them from it.
        assert phase_of_the_peak(last_kept[rank]) == ("forward", str(NUM_BLOCKS - 1))
        assert last_too[rank].peak.total < last_kept[rank].peak.total


def test_the_tracker_counts_a_block_s_gradients_as_temporary_until_its_backward_has_ended(pool: labkit.WorkerPool) -> None:
    timeline = pool.run(recorded, 0, 32, timeout_s=60)[0]
    begins = {mark.block: mark.at for mark in timeline.marks if mark.phase == "backward"}
    last, before = (begins[str(NUM_BLOCKS - place)] for place in (1, 2))
    gradients = [sample.gradients for sample in timeline.samples[last:before]]
    appear = next(place for place, size in enumerate(gradients) if size)
    weights = sum(parameter.nbytes for parameter in Block(ModelConfig(dim=64, num_layers=1, hidden_dim=192)).parameters())
    assert gradients[appear] == weights  # all at once
    earlier, later = timeline.samples[last + appear - 1 : last + appear + 1]
    assert earlier.temporary - later.temporary >= weights
