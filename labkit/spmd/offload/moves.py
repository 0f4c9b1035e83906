"""A saved storage on its way to the host and back, and the counts over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.errors import LabkitError
from labkit.spmd.offload.transfer import HostCopy, Transfer


class OffloadError(LabkitError, RuntimeError):
    """An offload was set up for modules that do not support it, or a saved tensor was changed before its copy was complete."""


@dataclass
class OffloadCounts:
    """What happened to the bytes that autograd saved in the blocks since the last `ActivationOffload.reset_counts`.

    Attributes:
        saved_bytes: All saved tensors, each counted as often as it was saved. ``save_on_cpu`` would move this much.
        weight_bytes: The part in parameters and buffers, which stay.
        small_bytes: The part in tensors below ``min_bytes``, which stay.
        other_bytes: The part in tensors of other kinds or on other devices (DTensors, sparse, conjugated), which stay.
        repeated_bytes: The part saved again, or as another view, when its storage already moves.
        moved_bytes: Storages sent to the host, each counted once and whole.
        num_moved: The number of these storages.
        fetched_bytes: Storages brought back. This is less than ``moved_bytes``, because what backward needs first never left the
            device.
        num_late: Number of storages that backward needed before their copy back had begun.
        peak_in_flight_bytes: The most device memory that was held only for copies that were under way or had arrived early.
    """

    saved_bytes: int = 0
    weight_bytes: int = 0
    small_bytes: int = 0
    other_bytes: int = 0
    repeated_bytes: int = 0
    moved_bytes: int = 0
    num_moved: int = 0
    fetched_bytes: int = 0
    num_late: int = 0
    peak_in_flight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """Stand-in for a saved tensor, kept by autograd."""

    move: Move
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any  # torch types it as int or SymInt


class Mover(Protocol):
    """The offload that a move belongs to; see `labkit.spmd.offload.context.ActivationOffload`."""

    counts: OffloadCounts
    in_flight_bytes: int

    def forget(self, number: int) -> None:
        """Handle the end of a move."""


class Move:
    """One storage on its way. It lives as long as a node of the graph needs it, and frees what it holds when deleted."""

    def __init__(self, owner: Mover, transfer: Transfer, number: int, raw: Tensor, copy: HostCopy, saved: Tensor) -> None:
        self.owner, self.number, self.copy, self.size_bytes = owner, number, copy, raw.numel()
        self.transfer = transfer
        self.raw: Tensor | None = raw  # the bytes on the device, until they have left and again once they come back
        self.version = saved._version
        self.saved: Tensor | None = saved  # shares the version counter of the tensor of the forward pass
        self.is_in_flight, self.is_leaving, self.is_torn = True, True, False

    def release(self) -> None:
        """Free the device's memory once the bytes have left."""
        self.transfer.wait_sent(self.copy)
        self._note_changes()
        self._land()
        self.raw, self.is_leaving = None, False
        if not self.transfer.is_alias:
            self.saved = None

    def fetch(self) -> None:
        """Begin to copy the bytes back."""
        self.raw, self.is_in_flight = self.transfer.fetch(self.copy), True
        self.owner.counts.fetched_bytes += self.size_bytes

    def use(self) -> Tensor:
        """Return the bytes on the device, for the graph node that runs now. They stay until no node needs them."""
        self._note_changes()
        if self.is_torn:
            raise OffloadError(
                "a tensor that backward needs was changed in place after it was saved and while it was being copied to the "
                "host, so neither copy is right. Without offload autograd refuses this too; leave out the in-place operation."
            )
        if self.raw is None:
            self.fetch()
            self.owner.counts.num_late += 1
            self.transfer.wait_fetched(self.copy)
            self.is_in_flight = False
        elif self.is_in_flight:
            if not self.is_leaving:
                self.transfer.wait_fetched(self.copy)
            self._land()
        raw = self.raw
        assert raw is not None  # fetched above
        return raw

    def _note_changes(self) -> None:
        self.is_torn = self.is_torn or (self.saved is not None and self.saved._version != self.version)

    def _land(self) -> None:
        self.is_in_flight = False
        self.owner.in_flight_bytes -= self.size_bytes

    def __del__(self) -> None:
        if self.is_leaving:
            self.transfer.wait_sent(self.copy)  # the copy still reads memory that is about to be freed
        elif self.is_in_flight:
            self.transfer.wait_fetched(self.copy)  # or still writes to that memory
        if self.is_in_flight:
            self._land()
        self.transfer.recycle(self.copy)
        self.owner.forget(self.number)
