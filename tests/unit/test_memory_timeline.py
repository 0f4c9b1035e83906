"""The memory of a step over its operations: equal to the tracker's peak, marked where blocks begin, drawn completely."""

from __future__ import annotations

import xml.dom.minidom
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.notebook.pictures.memory_timelines import KINDS, memory_timeline
from labkit.spmd.memory.kinds import MemoryParts, tracked_peak
from labkit.spmd.memory.timeline import MemoryMark, MemoryTimeline, record_memory
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.transformer import ModelConfig, next_token_loss

CONFIG = ModelConfig(dim=32, num_layers=2, num_heads=2, hidden_dim=48, max_seq_len=32)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_steps_record_has_the_trackers_peak_and_marks_each_block_once_each_way(group: None) -> None:
    model = build_model(CONFIG)
    checkpoint(model.layers[0])
    for module in (*model.layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(model.parameters())
    batch = next(BatchSampler(batch_size=4, seq_len=32))

    def step() -> None:
        next_token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    blocks = {str(place): block for place, block in enumerate(model.layers)}
    timeline = record_memory(model, optimizer, (batch,), step, blocks)
    assert timeline.peak == tracked_peak(model, optimizer, (batch,), step)
    assert [(mark.phase, mark.block) for mark in timeline.marks] == [
        ("forward", ""),
        ("forward", "0"),
        ("forward", "1"),
        ("backward", ""),
        ("backward", "1"),
        ("backward", "0"),
        ("optimizer", ""),
    ]
    places = [mark.at for mark in timeline.marks]
    assert places == sorted(places)
    with pytest.raises(ValueError, match="no operation"):
        record_memory(model, optimizer, (batch,), lambda: None, blocks)


SAMPLES = tuple(MemoryParts(10, gradients, 20, activations, 5) for gradients, activations in ((0, 0), (0, 90), (0, 60), (8, 0)))
MARKS = (MemoryMark(0, "forward"), MemoryMark(1, "forward", "a"), MemoryMark(2, "backward", "a"), MemoryMark(3, "optimizer"))


def test_the_picture_tells_the_most_bytes_in_each_part_of_the_step() -> None:
    picture = memory_timeline(MemoryTimeline(SAMPLES, MARKS), caption="A step.")
    xml.dom.minidom.parseString(picture.svg)
    assert picture.columns == ("part of the step", "operations", *KINDS, "together")
    assert picture.rows == (
        ("forward", "1", "10", "20", "0", "0", "5", "35"),
        ("forward of block a", "1", "10", "20", "0", "90", "5", "125"),
        ("backward of block a", "1", "10", "20", "0", "60", "5", "95"),
        ("optimizer", "1", "10", "20", "8", "0", "5", "43"),
    )
    assert picture.alt == (
        "Stacked areas over 4 operations of a step. It begins with 35 bytes and ends with 43. "
        "The peak is in forward of block a: 125 bytes, most of them activations (90)."
    )
    assert [spot.text.split(",")[0] for spot in picture.spots] == [row[0] for row in picture.rows]
    assert repr(picture).startswith("A step.\nStacked areas")


def test_a_long_step_stays_a_small_picture_and_keeps_its_peak() -> None:
    samples = tuple(MemoryParts(10, 0, 20, number % 97, 5) for number in range(6000))
    high = (*samples[:3001], MemoryParts(10, 0, 20, 500, 5), *samples[3001:])
    picture = memory_timeline(MemoryTimeline(high, MARKS), caption="A step.")
    assert len(picture.svg) < 200_000
    assert "535 bytes" in picture.alt
