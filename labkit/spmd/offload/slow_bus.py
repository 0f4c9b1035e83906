"""A simulated bus for learning: real copies on separate threads, as slow as you like, to show overlap without a GPU."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from labkit.spmd.offload.transfer import HostCopy


class SlowBus:
    """A `labkit.spmd.offload.transfer.Transfer` between two parts of the CPU's memory, with a bandwidth of your choice.

    For each direction, a thread waits as long as a bus of that bandwidth would take, then copies. Waiting costs no processor time,
    so computation and copies overlap as on a GPU. Once a tensor has left, its memory really is freed.

    Args:
        bytes_per_s: Bandwidth of each direction.

    Raises:
        ValueError: The bandwidth is not positive.

    Ranks: local. Call `close` at the end, to stop its two threads.
    """

    is_alias = False

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"a bus of {bytes_per_s} bytes per second never arrives; give a positive bandwidth")
        self.bytes_per_s = bytes_per_s
        self._out, self._back = _Direction("out", bytes_per_s), _Direction("back", bytes_per_s)
        self._free: dict[int, list[HostCopy]] = {}
        self._host_bytes = 0

    def send(self, source: Tensor) -> HostCopy:
        """See `Transfer`."""
        if waiting := self._free.get(source.numel()):
            copy = waiting.pop()
        else:
            self._host_bytes += source.numel()
            copy = HostCopy(torch.empty_like(source))
        copy.sent = self._out.copy(copy.host, source, after=None)
        return copy

    def wait_sent(self, copy: HostCopy) -> None:
        """See `Transfer`; this one does wait on the CPU, because here the CPU computes."""
        copy.sent.result()

    def fetch(self, copy: HostCopy) -> Tensor:
        """See `Transfer`."""
        target = torch.empty_like(copy.host)
        copy.fetched = self._back.copy(target, copy.host, after=copy.sent)
        return target

    def wait_fetched(self, copy: HostCopy) -> None:
        """See `Transfer`; this one waits on the CPU."""
        copy.fetched.result()

    def recycle(self, copy: HostCopy) -> None:
        """See `Transfer`."""
        self._free.setdefault(copy.host.numel(), []).append(copy)

    def host_bytes(self) -> int:
        """See `Transfer`."""
        return self._host_bytes

    def close(self) -> None:
        """Stop the two threads. Blocks until the copies under way have arrived."""
        self._out.threads.shutdown()
        self._back.threads.shutdown()


class _Direction:
    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.threads = ThreadPoolExecutor(1, thread_name_prefix=f"labkit-bus-{name}")
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0

    def copy(self, target: Tensor, source: Tensor, after: Future[None] | None) -> Future[None]:
        return self.threads.submit(self._copy, target, source, after, time.monotonic())

    def _copy(self, target: Tensor, source: Tensor, after: Future[None] | None, asked_at: float) -> None:
        if after is not None:
            after.result()
        # Count from when the bus became free rather than from when this thread woke up, so that wake-up delays do not add up.
        self._free_at = max(self._free_at, asked_at) + source.numel() / self._bytes_per_s
        time.sleep(max(0.0, self._free_at - time.monotonic()))
        target.copy_(source)
