"""Measurement of what autograd keeps between forward and backward, by storage, for real tensors and for tensors without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from labkit.spmd.offload.context import ActivationOffload


class SavedStorages:
    """The storages that autograd has saved so far; views and repeated saves of a storage count once."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def note(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves, and return the tensor to keep in its place."""
        # Detach it: a saved output refers to its own node, which would make a cycle that is never collected.
        tensor = tensor.detach()
        storage = _local(tensor).untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def size_bytes(self, model: nn.Module) -> int:
        """Return the bytes of activations: saved storages that hold memory now and are neither parameters nor buffers of the model.

        Call it when forward has ended. By then, weights that FSDP gathered and freed again hold no memory, and weights that are
        still whole are parameters of the model.

        Ranks: local.
        """
        tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        own = {_local(tensor).untyped_storage()._cdata for tensor in tensors}
        return sum(storage.nbytes() for key, storage in self._storages.items() if key not in own)


@contextmanager
def watch_saved() -> Iterator[SavedStorages]:
    """Watch what autograd saves while the block runs.

    A module with its own hooks hides its saved tensors from this watch; for an offload, use a `WatchedOffload`. Of a checkpointed
    module only the inputs are seen, since it saves nothing else in forward.

    Returns:
        A context manager that yields the storages.

    Ranks: local. It does not affect backward.
    """
    saved = SavedStorages()
    with saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved


class WatchedOffload(ActivationOffload):
    """An activation offload that reports to a watch the tensors it leaves on the device, which its hooks hide from outer hooks.

    Attributes:
        saved: The watch, set before each forward.
    """

    saved: SavedStorages

    def _pack(self, tensor: Tensor) -> Any:
        packed = super()._pack(tensor)
        return self.saved.note(packed) if isinstance(packed, Tensor) else packed


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
