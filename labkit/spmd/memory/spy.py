"""Spies on torch's own offload: how many bytes it moves, and how often a block runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu


@dataclass
class SaveOnCpuCounts:
    """What ``save_on_cpu`` moved.

    Attributes:
        num_entered: How often its context was entered.
        num_tensors: Saved tensors that it moved.
        moved_bytes: Bytes of these tensors; a tensor that is saved twice counts twice.
    """

    num_entered: int = 0
    num_tensors: int = 0
    moved_bytes: int = 0


@contextmanager
def spy_save_on_cpu() -> Iterator[SaveOnCpuCounts]:
    """Count what every ``save_on_cpu`` in this process moves, including the one inside ``offload_wrapper``.

    Apart from counting, nothing changes. Ranks: local.
    """
    counts = SaveOnCpuCounts()
    original_init: Any = save_on_cpu.__init__
    original_enter: Any = save_on_cpu.__enter__

    def spied_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        pack = self.pack_hook

        def spied_pack(tensor: Tensor) -> Any:
            counts.num_tensors += 1
            counts.moved_bytes += tensor.nbytes
            return pack(tensor)

        self.pack_hook = spied_pack

    def spied_enter(self: Any) -> Any:
        counts.num_entered += 1
        return original_enter(self)

    changed: Any = save_on_cpu
    changed.__init__, changed.__enter__ = spied_init, spied_enter
    try:
        yield counts
    finally:
        changed.__init__ = original_init
        if original_enter is torch.autograd.graph.saved_tensors_hooks.__enter__:
            del changed.__enter__
        else:
            changed.__enter__ = original_enter


@contextmanager
def count_forwards(modules: Iterable[nn.Module]) -> Iterator[list[int]]:
    """Count how often each module's forward runs, including recomputation.

    Returns:
        A context manager that yields a list with one number per module, in order.

    Ranks: local.
    """
    watched = list(modules)
    counts = [0] * len(watched)

    def hook_for(place: int) -> Any:
        def hook(*_: Any) -> None:
            counts[place] += 1

        return hook

    handles = [module.register_forward_pre_hook(hook_for(place)) for place, module in enumerate(watched)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
