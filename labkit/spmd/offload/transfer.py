"""Transfers of saved activations from the device to the host and back, either over CUDA streams or only counted."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(eq=False)
class HostCopy:
    """One storage's copy in host memory.

    Attributes:
        host: Its bytes, a one-dimensional uint8 tensor.
        memory: The host memory that holds them, which may be larger.
        sent: The event after which it is complete, of the transfer's own kind; None if there is nothing to wait for.
        fetched: The event after which its last read is complete; likewise.
        stream: The stream that produces and uses the bytes, of the transfer's own kind or None.
    """

    host: Tensor
    memory: Tensor = field(init=False)
    sent: Any = None
    fetched: Any = None
    stream: Any = None

    def __post_init__(self) -> None:
        self.memory = self.host


class Transfer(Protocol):
    """The interface that `labkit.spmd.offload.context.ActivationOffload` needs from a bus. No method waits on the CPU."""

    #: Whether the copies are the tensors themselves, so that writing to a tensor later changes its copy.
    is_alias: bool

    def send(self, source: Tensor) -> HostCopy:
        """Begin to copy bytes to the host. The caller keeps ``source`` until it has called `wait_sent`."""

    def wait_sent(self, copy: HostCopy) -> None:
        """Make the computation wait until the bytes have left, so that their memory may be reused."""

    def fetch(self, copy: HostCopy) -> Tensor:
        """Begin to copy the bytes back into new memory on the device, which must not be read before `wait_fetched`."""

    def wait_fetched(self, copy: HostCopy) -> None:
        """Make the computation wait until the bytes are back."""

    def recycle(self, copy: HostCopy) -> None:
        """Take back the host memory of a copy that is no longer needed."""

    def host_bytes(self) -> int:
        """Return how many bytes of host memory this transfer holds, whether in use or kept for the next step."""


@dataclass(eq=False)
class CountingTransfer:
    """A transfer that only counts: the tensors stay in place.

    Offloads on a CPU use it, because there host and device share one memory.
    """

    is_alias: bool = True

    def send(self, source: Tensor) -> HostCopy:
        """See `Transfer`."""
        return HostCopy(source)

    def wait_sent(self, copy: HostCopy) -> None:
        """See `Transfer`."""

    def fetch(self, copy: HostCopy) -> Tensor:
        """See `Transfer`."""
        return copy.host

    def wait_fetched(self, copy: HostCopy) -> None:
        """See `Transfer`."""

    def recycle(self, copy: HostCopy) -> None:
        """See `Transfer`."""

    def host_bytes(self) -> int:
        """See `Transfer`."""
        return 0


@dataclass(eq=False)
class CudaTransfer:
    """Copies between a GPU and pinned host memory, one stream for each direction, ordered by events.

    Device memory is always taken from the computing stream, and returned to it after that stream has been told to wait for the
    copy, so the allocator may reuse it at once. ``record_stream`` would hold it back for an unknown time. Host memory is kept from
    step to step, because pinning is slow and would stall the device. torch pins powers of two, so this class requests powers of two
    and uses each for anything that fits; then batches of varying length do not pin more.

    Args:
        device: A CUDA device with an index.
    """

    device: torch.device
    is_alias: bool = False
    _out: Any = field(init=False)
    _back: Any = field(init=False)
    _free: dict[int, deque[HostCopy]] = field(init=False, default_factory=lambda: defaultdict(deque))  # by size; oldest first
    _host_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._out, self._back = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def send(self, source: Tensor) -> HostCopy:
        """See `Transfer`."""
        copy = self._host_memory(source.numel())
        copy.stream = torch.cuda.current_stream(self.device)
        self._out.wait_stream(copy.stream)  # until the bytes are computed
        if copy.fetched is not None:
            self._out.wait_event(copy.fetched)  # and until the last read of this host memory is complete
        with torch.cuda.stream(self._out):
            copy.host.copy_(source, non_blocking=True)
        copy.sent, copy.fetched = self._out.record_event(), None
        return copy

    def wait_sent(self, copy: HostCopy) -> None:
        """See `Transfer`."""
        copy.stream.wait_event(copy.sent)

    def fetch(self, copy: HostCopy) -> Tensor:
        """See `Transfer`."""
        copy.stream = torch.cuda.current_stream(self.device)
        target = torch.empty_like(copy.host, device=self.device, pin_memory=False)
        self._back.wait_stream(copy.stream)  # a kernel that is still running may use this memory
        self._back.wait_event(copy.sent)
        with torch.cuda.stream(self._back):
            target.copy_(copy.host, non_blocking=True)
        copy.fetched = self._back.record_event()
        return target

    def wait_fetched(self, copy: HostCopy) -> None:
        """See `Transfer`."""
        copy.stream.wait_event(copy.fetched)

    def recycle(self, copy: HostCopy) -> None:
        """See `Transfer`."""
        self._free[copy.memory.numel()].append(copy)

    def host_bytes(self) -> int:
        """See `Transfer`."""
        return self._host_bytes

    def _host_memory(self, size_bytes: int) -> HostCopy:
        capacity = 1 << (size_bytes - 1).bit_length()
        if waiting := self._free[capacity]:
            copy = waiting.popleft()
        else:
            self._host_bytes += capacity
            copy = HostCopy(torch.empty(capacity, dtype=torch.uint8, pin_memory=True))
        copy.host = copy.memory[:size_bytes]
        return copy


def transfer_for(device: torch.device) -> Transfer:
    """Return the transfer that suits a device: streams and pinned memory for CUDA, counting for everything else."""
    return CudaTransfer(device) if device.type == "cuda" else CountingTransfer()
