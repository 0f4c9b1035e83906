"""The order that `CudaTransfer` imposes on its streams, tested with clocks in place of streams: finding a race needs no GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.spmd.offload.transfer import CountingTransfer, CudaTransfer, transfer_for

Moment = dict[str, int]


class Stream:
    """A vector clock: the events of each stream that precede the next event of this one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Moment = {}

    def act(self) -> Moment:
        """Add an event to this stream and return its time."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return dict(self.clock)

    def record_event(self) -> Moment:
        return dict(self.clock)

    def wait_event(self, event: Moment) -> None:
        for name, count in event.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


def happened(moment: Moment, stream: Stream) -> bool:
    """Return whether all events of a moment precede the stream's next event."""
    return all(stream.clock.get(name, 0) >= count for name, count in moment.items())


class Streams:
    """A stand-in for ``torch.cuda``: the computation's stream and the transfer's; it notes each copy."""

    def __init__(self) -> None:
        self.compute, self.made = Stream("compute"), list[Stream]()
        self.copies: list[tuple[Stream, Moment]] = []

    def make(self, device: Any) -> Stream:
        self.made.append(Stream(["out", "back"][len(self.made)]))
        return self.made[-1]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        self.copies.append((stream, stream.act()))
        yield


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    fake, empty = Streams(), torch.empty
    monkeypatch.setattr(torch.cuda, "Stream", fake.make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.compute)
    monkeypatch.setattr(torch.cuda, "stream", fake.use)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))  # noqa: PLW0108
    return fake


@pytest.fixture
def transfer(streams: Streams) -> CudaTransfer:
    return CudaTransfer(torch.device("cpu"))


def data(size: int = 8) -> Tensor:
    return torch.arange(size, dtype=torch.uint8)


def test_a_copy_leaves_after_it_was_computed_and_memory_is_free_after_it_left(streams: Streams, transfer: CudaTransfer) -> None:
    computed = streams.compute.act()
    copy = transfer.send(data())
    (out, left) = streams.copies[-1]
    assert out.name == "out"
    assert computed.items() <= left.items()
    assert not happened(left, streams.compute)  # the computation goes on
    transfer.wait_sent(copy)
    assert happened(left, streams.compute)


def test_a_copy_comes_back_after_it_left_into_memory_that_nobody_uses(streams: Streams, transfer: CudaTransfer) -> None:
    copy = transfer.send(data())
    (_, left) = streams.copies[-1]
    last_use = streams.compute.act()
    back = transfer.fetch(copy)
    (stream, arrived) = streams.copies[-1]
    assert stream.name == "back"
    for earlier in (left, last_use):
        assert all(arrived.get(name, 0) >= count for name, count in earlier.items())
    assert not happened(arrived, streams.compute)
    transfer.wait_fetched(copy)
    assert happened(arrived, streams.compute)
    assert torch.equal(back, data())


def test_host_memory_is_written_again_after_its_last_reader(streams: Streams, transfer: CudaTransfer) -> None:
    first = transfer.send(data())
    transfer.fetch(first)
    (_, read) = streams.copies[-1]
    transfer.recycle(first)
    second = transfer.send(data())
    (_, written) = streams.copies[-1]
    assert second is first
    assert transfer.host_bytes() == 8
    assert all(written.get(name, 0) >= count for name, count in read.items())
    transfer.send(data())
    assert transfer.host_bytes() == 16


def test_host_memory_is_counted_as_it_is_taken_in_powers_of_two_and_serves_what_fits(
    streams: Streams, transfer: CudaTransfer
) -> None:
    large = transfer.send(data(100))
    assert transfer.host_bytes() == 128
    transfer.recycle(large)
    smaller = transfer.send(data(65))
    assert smaller is large
    assert smaller.host.tolist() == list(range(65))
    transfer.recycle(smaller)
    assert transfer.send(data(64)) is not large
    larger = transfer.send(data(128))
    assert larger is large
    assert larger.host.tolist() == list(range(128))
    assert transfer.host_bytes() == 128 + 64


def test_lengths_that_change_from_step_to_step_pin_a_bounded_amount(streams: Streams, transfer: CudaTransfer) -> None:
    for length in (random.Random(1).sample(range(1, 1000), 999)) * 3:
        transfer.recycle(transfer.send(data(8).repeat(length)))
    assert transfer.host_bytes() == 8 * (1024 + 512 + 256 + 128 + 64 + 32 + 16 + 8 + 4 + 2 + 1)


def test_a_stream_that_computes_elsewhere_is_the_one_that_waits(streams: Streams, transfer: CudaTransfer) -> None:
    copy = transfer.send(data())
    forward = streams.compute
    streams.compute = Stream("another")
    transfer.wait_sent(copy)  # the memory belongs to the stream on which it was computed
    assert happened(streams.copies[-1][1], forward)
    transfer.fetch(copy)
    transfer.wait_fetched(copy)  # and now to the one that reads it
    assert happened(streams.copies[-1][1], streams.compute)


def test_every_device_but_cuda_counts() -> None:
    assert isinstance(transfer_for(torch.device("cpu")), CountingTransfer)
