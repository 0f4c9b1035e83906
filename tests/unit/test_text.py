from __future__ import annotations

import pytest
import torch

from labkit.spmd.model.text import BatchSampler, english_text


def test_the_text_is_english_and_long_enough_to_train_on() -> None:
    text = bytes(english_text())
    assert len(text) > 300_000
    assert b"statement" in text
    assert b" the " in text


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_ranks_together_get_exactly_the_global_batch(world_size: int) -> None:
    samplers = [BatchSampler(batch_size=12, seq_len=16, seed=5, rank=rank, world_size=world_size) for rank in range(world_size)]
    for position in range(3):
        batch = torch.cat([next(sampler) for sampler in samplers])
        assert batch.shape == (12, 17)
        assert batch.dtype == torch.int64
        assert torch.equal(batch, samplers[0].global_batch(position))


def test_batches_differ_by_position_and_by_seed() -> None:
    sampler = BatchSampler(batch_size=4, seq_len=32, seed=0)
    assert not torch.equal(sampler.global_batch(0), sampler.global_batch(1))
    assert not torch.equal(sampler.global_batch(0), BatchSampler(batch_size=4, seq_len=32, seed=1).global_batch(0))


def test_a_restored_sampler_goes_on_with_another_world_size() -> None:
    whole = BatchSampler(batch_size=6, seq_len=8)
    for _ in range(5):
        next(whole)
    halves = [BatchSampler(batch_size=6, seq_len=8, rank=rank, world_size=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(whole.state_dict())
    assert torch.equal(torch.cat([next(half) for half in halves]), next(whole))


def test_windows_reach_the_last_byte_and_no_further() -> None:
    text = torch.arange(5, dtype=torch.uint8)
    sampler = BatchSampler(batch_size=64, seq_len=3, text=text)
    seen = {tuple(row.tolist()) for row in sampler.global_batch(0)}
    assert seen == {(0, 1, 2, 3), (1, 2, 3, 4)}


@pytest.mark.parametrize("changed", ["seed", "batch_size", "seq_len"])
def test_a_position_in_other_data_is_refused_by_name(changed: str) -> None:
    settings = {"seed": 1, "batch_size": 4, "seq_len": 8}
    saved = BatchSampler(**settings).state_dict()
    with pytest.raises(ValueError, match=f"{changed} {settings[changed]}, here {settings[changed] + 1}"):
        BatchSampler(**{**settings, changed: settings[changed] + 1}).load_state_dict(saved)


def test_a_batch_that_cannot_be_shared_evenly_is_refused() -> None:
    for name in ("batch_size", "seq_len"):
        with pytest.raises(ValueError, match=f"{name}=0.* at least 1"):
            BatchSampler(**{"batch_size": 8, "seq_len": 4, name: 0})
    with pytest.raises(ValueError, match="3 ranks cannot share a batch of 8 evenly"):
        BatchSampler(batch_size=8, seq_len=8, world_size=3)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is outside a world of 2"):
        BatchSampler(batch_size=8, seq_len=8, rank=2, world_size=2)


def test_a_text_without_room_for_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        BatchSampler(batch_size=1, seq_len=8, text=torch.zeros(8, dtype=torch.uint8))
