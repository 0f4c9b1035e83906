"""Activation offload that overlaps with computation: tensors that autograd saves in chosen blocks move to host memory.

`torch.autograd.graph.save_on_cpu` copies every saved tensor on the computing stream: the computation waits for each copy, weights
are copied too, and a tensor that three operations save is copied three times. Here the unit is a *storage*: it leaves once, on a
separate stream, while the computation goes on, and comes back before backward needs it. Weights, buffers and small tensors stay.
The hooks on saved tensors are torch's (``torch.autograd.graph.saved_tensors_hooks``); fetching activations ahead of their use is
vDNN's idea (Rhu et al., 2016, arXiv:1602.08124).
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from labkit.spmd.offload.moves import Move, OffloadCounts, OffloadError, View
from labkit.spmd.offload.transfer import Transfer, transfer_for

MIB = 1 << 20
# Fake tensors have no data, and planning treats them like plain ones. Other subclasses hold more than one storage.
_PLAIN = (Tensor, nn.Parameter, FakeTensor)

__all__ = ["MIB", "ActivationOffload", "OffloadCounts", "OffloadError"]


class ActivationOffload:
    """An offload that keeps the saved activations of some blocks in host memory between forward and backward.

    It works with plain modules, inside and around FSDP1 and FSDP2, and around activation checkpointing. Around a checkpointed
    block it moves only the block's inputs, and backward recomputes the rest. *Inside* a checkpointed block it takes every
    tensor before the checkpoint sees it, so nothing is recomputed. Gradients are exact: the bytes come back unchanged.

    The block whose backward comes first has the least time for its copies, out and back, so moving its activations costs the most
    time. But moving them still lowers the minimum peak, because a block's activations leave the device while the block runs.

    Args:
        blocks: Modules whose saved activations move. This puts hooks on them; `close` removes the hooks.
        max_in_flight_bytes: The most device memory that copies under way may hold, out and back together. When it is used up, the
            computation waits for the oldest copy. A storage above this limit is copied alone.
        min_bytes: Storages smaller than this stay on the device.
        transfer: How bytes move; by default, over two streams and pinned memory on a CUDA device, while elsewhere they are only
            counted.

    Raises:
        OffloadError: No block is given, or one is given twice or lies inside another, so that it is unclear which of them moves its
            activations.

    Ranks: local. It does not communicate, and each rank may make its own choice. No call waits on the CPU, except to pin memory in
        the first steps. Host memory is kept for the next step until `close`.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        max_in_flight_bytes: int = 256 * MIB,
        min_bytes: int = MIB,
        transfer: Transfer | None = None,
    ) -> None:
        self.blocks = list(blocks)
        _check_blocks(self.blocks)
        self.max_in_flight_bytes, self.min_bytes = max_in_flight_bytes, min_bytes
        self.counts = OffloadCounts()
        self._transfer = transfer
        self._device: torch.device | None = None
        self._entered: list[_Entered] = []
        self._by_storage: Any = WeakIdKeyDictionary()
        self._moves: dict[int, weakref.ref[Move]] = {}
        self._numbers: list[int] = []  # the keys of _moves, in the order of forward
        self._next_number = 0
        self._leaving: deque[weakref.ref[Move]] = deque()
        self.in_flight_bytes = 0  #: Device memory currently held by copies.
        # These hooks must run first on entry and last on exit, even if torch's composable `checkpoint` hooks the same module.
        self._handles = [block.register_forward_pre_hook(self._enter, prepend=True) for block in self.blocks]
        self._handles += [block.register_forward_hook(self._leave, always_call=True) for block in self.blocks]

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held, whether in use or kept for the next step."""
        return self._transfer.host_bytes() if self._transfer else 0

    def reset_counts(self) -> OffloadCounts:
        """Reset the counts to zero, and return the previous ones."""
        counts, self.counts = self.counts, OffloadCounts()
        return counts

    def close(self) -> None:
        """Remove the hooks from the blocks. A backward that is still to come gets its tensors; then the host memory is freed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._transfer = None

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Forward ----------------------------------------------------------------------------------------------------------

    def _enter(self, block: nn.Module, _: Any) -> None:
        # During backward, forward runs only to recompute: its saved tensors are used at once, and the checkpoint must see them.
        in_backward = torch._C._current_graph_task_id() != -1
        hooks: AbstractContextManager[Any] = nullcontext() if in_backward else saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(_Entered(block, hooks))

    def _leave(self, *_: Any) -> None:
        # torch also calls this hook after an error, possibly one before `_enter`.
        if self._entered:
            self._entered.pop().hooks.__exit__(None, None, None)

    def _pack(self, tensor: Tensor) -> Any:
        self.counts.saved_bytes += tensor.nbytes
        # A weight is a leaf or, under FSDP1, a view of one; the result of an operation in this graph is neither.
        root = tensor._base if tensor._is_view() else tensor
        is_made = root is not None and not root.is_leaf
        # Detach it: a saved output refers to its own node, which would make a cycle that is never collected.
        tensor = tensor.detach()
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_meta:
            self.counts.other_bytes += tensor.nbytes
            return tensor
        storage = tensor.untyped_storage()
        move = self._known(storage, tensor._version)
        if move is not None:
            self.counts.repeated_bytes += tensor.nbytes
        elif storage.nbytes() < self.min_bytes:
            self.counts.small_bytes += tensor.nbytes
            return tensor
        elif not is_made and self._is_weight(storage):
            self.counts.weight_bytes += tensor.nbytes
            return tensor
        elif not self._is_here(tensor.device):
            self.counts.other_bytes += tensor.nbytes
            return tensor
        else:
            move = self._send(storage, tensor)
        return View(move, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _is_here(self, device: torch.device) -> bool:
        # Let only the first storage large enough to move set the device: torch.utils.checkpoint saves an empty tensor on the CPU
        # before the inputs of a block on a GPU.
        if self._device is None:
            self._device = device
            self._transfer = self._transfer or transfer_for(device)
        return self._device == device

    def _known(self, storage: torch.UntypedStorage, version: int) -> Move | None:
        reference = self._by_storage.get(storage)
        move: Move | None = reference() if reference else None
        return move if move is not None and move.version == version else None

    def _is_weight(self, storage: torch.UntypedStorage) -> bool:
        # Search the modules for every saved tensor, because FSDP replaces their tensors whenever it gathers or frees. FSDP1 with
        # use_orig_params=False keeps its views of the flat parameter as plain attributes.
        for module in self._entered[-1].modules:
            held: tuple[Mapping[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
            for value in chain.from_iterable(values.values() for values in held):
                if type(value) in _PLAIN and value.untyped_storage() is storage:
                    return True
        return False

    def _send(self, storage: torch.UntypedStorage, tensor: Tensor) -> Move:
        assert self._transfer is not None  # set by _is_here
        size_bytes = storage.nbytes()
        self._make_room(size_bytes)
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        raw.set_(storage)
        move = Move(self, self._transfer, self._next_number, raw, self._transfer.send(raw), tensor)
        self._by_storage[storage] = weakref.ref(move)
        self._moves[move.number] = weakref.ref(move)
        self._numbers.append(move.number)
        self._next_number += 1
        self._leaving.append(weakref.ref(move))
        self._hold(size_bytes)
        self.counts.moved_bytes += size_bytes
        self.counts.num_moved += 1
        return move

    def _make_room(self, size_bytes: int) -> None:
        """Make room for one more copy by letting the computation wait until the oldest copies have left."""
        while self._leaving:
            move = self._leaving[0]()
            if move is not None and move.is_in_flight:
                if self.in_flight_bytes + size_bytes <= self.max_in_flight_bytes:
                    break
                move.release()
            self._leaving.popleft()

    def _hold(self, size_bytes: int) -> None:
        self.in_flight_bytes += size_bytes
        self.counts.peak_in_flight_bytes = max(self.counts.peak_in_flight_bytes, self.in_flight_bytes)

    # Backward ---------------------------------------------------------------------------------------------------------

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, View):
            kept: Tensor = saved
            return kept
        raw = saved.move.use()
        self._fetch_ahead(saved.move.number)
        return torch.empty(0, dtype=saved.dtype, device=raw.device).set_(
            raw.untyped_storage(), saved.offset, saved.size, saved.stride
        )

    def _fetch_ahead(self, number: int) -> None:
        """Bring back the storages saved before this one, as far as the limit allows, since backward uses them in reverse order."""
        for place in reversed(range(bisect_left(self._numbers, number))):
            move = self._moves[self._numbers[place]]()
            if move is None or move.raw is not None:
                continue
            if self.in_flight_bytes + move.size_bytes > self.max_in_flight_bytes:
                break
            move.fetch()
            self._hold(move.size_bytes)

    def forget(self, number: int) -> None:
        """Remove a `Move` that no longer exists. Only for `Move`."""
        del self._moves[number]
        del self._numbers[bisect_left(self._numbers, number)]


@dataclass
class _Entered:
    """A block whose forward is running."""

    block: nn.Module
    hooks: AbstractContextManager[Any]

    @cached_property
    def modules(self) -> list[nn.Module]:
        return list(self.block.modules())


def _check_blocks(blocks: list[nn.Module]) -> None:
    if not blocks:
        raise OffloadError("no block is given, so nothing would move. Give the modules whose activations should move to the host.")
    places = {id(block): place for place, block in enumerate(blocks)}
    for place, block in enumerate(blocks):
        for module in block.modules():
            other = places.get(id(module), place)
            if other != place:
                raise OffloadError(
                    f"block {other} ({type(module).__name__}) is given twice or lies inside block {place}, so it is unclear which "
                    "of the two moves its activations. Give each module once, and none inside another."
                )
