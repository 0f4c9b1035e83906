"""Measure what autograd keeps between forward and backward, storage by storage, on real ranks and on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from labkit.spmd.offload import ActivationOffload


class SavedStorages:
    """The storages of what autograd has saved so far, each once, with views and repeated saves of it."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def note(self, tensor: Tensor) -> Tensor:
        """Take in a tensor that is saved; returns what to keep of it."""
        # An output that is saved knows its own node: to hold it as it is would be a cycle that nobody collects.
        tensor = tensor.detach()
        storage = _local(tensor).untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def size_bytes(self, model: nn.Module) -> int:
        """Bytes of the activations: what holds memory now and is no parameter or buffer of the model.

        To be asked when forward has ended. Weights that FSDP gathered and has freed again hold no memory then, and those that
        are still whole are the model's parameters.

        Ranks: local.
        """
        tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
        own = {_local(tensor).untyped_storage()._cdata for tensor in tensors}
        return sum(storage.nbytes() for key, storage in self._storages.items() if key not in own)


@contextmanager
def watch_saved() -> Iterator[SavedStorages]:
    """Watch what autograd saves while the block runs.

    What a module with hooks of its own takes is not seen, so where there is an offload it is a `WatchedOffload`. Of a
    checkpointed module only the inputs are saved in forward, and only they are seen.

    Returns:
        A context manager that gives the storages.

    Ranks: local. It changes nothing that backward does.
    """
    saved = SavedStorages()
    with saved_tensors_hooks(saved.note, lambda tensor: tensor):
        yield saved


class WatchedOffload(ActivationOffload):
    """An activation offload that tells a watch what it leaves on the device: its hooks hide that from those around them.

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
