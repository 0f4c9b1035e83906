"""Tracing of the tensors that torch's ``input_reshard`` keeps for backward, and of whether each comes back unchanged.

``input_reshard`` registers hooks for *every* tensor that autograd saves during a module's forward. It assumes that every replicated
DTensor and every plain tensor is equal on all TP ranks, so each rank keeps some of the rows, and backward gathers them. But a plain
tensor between a column-parallel and a row-parallel layer is not equal, because each rank has different features. Backward then
gathers rows of different tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd saved.

    Attributes:
        kind: Its placements as torch writes them, or ``plain``.
        shape: The shape that this rank sees; for a DTensor the global shape.
        kept: Number of its elements that this rank keeps.
        comes_back: Whether unpacking gives the same values on this rank.
    """

    kind: str
    shape: tuple[int, ...]
    kept: int
    comes_back: bool


@dataclass
class ReshardTrace:
    """A trace of the tensors that were saved, in order.

    Attributes:
        saved: The activations. Parameters are left out, because they exist anyway.
    """

    saved: list[SavedTensor] = field(default_factory=list)
    _kept: list[Tensor] = field(default_factory=list)

    @property
    def kept_bytes(self) -> int:
        """Bytes that this rank keeps for backward; tensors that share memory count once."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._kept}
        return sum(storages.values())


@contextmanager
def trace_input_reshard(
    model: nn.Module, tp_mesh: DeviceMesh, *, modules: Sequence[nn.Module] = (), dim: int = 0
) -> Iterator[ReshardTrace]:
    """Trace what forward saves in the block, as if ``input_reshard(module, tp_mesh, dim)`` had been called on each of ``modules``.

    Args:
        model: The model whose forward runs in the block; backward may run there too.
        tp_mesh: The TP axis.
        modules: The modules whose forward uses the hooks; everything else is saved whole.
        dim: The dim along which torch divides the tensors that it keeps.

    Yields:
        The trace, filled as the forward runs.

    Ranks: collective, because unpacking gathers, in the same order on every rank.
    """
    # These functions are private and used only here; with torch's own rule, the trace cannot deviate from it.
    from torch.distributed.tensor.parallel.input_reshard import _pack_hook_tp, _unpack_hook_tp

    trace = ReshardTrace()
    parameters = {_local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack_whole(tensor: Tensor) -> Any:
        if _local(tensor).untyped_storage().data_ptr() not in parameters:
            _record(trace, tensor, tensor, comes_back=True)
        return tensor

    def pack(tensor: Tensor) -> Any:
        packed = _pack_hook_tp(tp_mesh, dim, tensor)
        back = _unpack_hook_tp(tp_mesh, dim, packed)
        same = torch.equal(_whole(tensor), _whole(back))
        if _local(tensor).untyped_storage().data_ptr() not in parameters:
            _record(trace, tensor, packed, comes_back=same)
        return packed

    def unpack(packed: Any) -> Tensor:
        return _unpack_hook_tp(tp_mesh, dim, packed)

    handles = []
    with ExitStack() as stack:
        stack.enter_context(saved_tensors_hooks(pack_whole, lambda tensor: tensor))
        for module in modules:
            inside = saved_tensors_hooks(pack, unpack)

            def enter(*_: object, inside: saved_tensors_hooks = inside) -> None:
                inside.__enter__()

            def leave(*_: object, inside: saved_tensors_hooks = inside) -> None:
                inside.__exit__()

            # always_call, because hooks left on after an error would apply to everything that this process saves afterwards.
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
        try:
            yield trace
        finally:
            for handle in handles:
                handle.remove()


def _record(trace: ReshardTrace, tensor: Tensor, packed: Any, *, comes_back: bool) -> None:
    kind = str(tuple(tensor.placements)) if isinstance(tensor, DTensor) else "plain"
    kept = _local(packed)
    trace.saved.append(SavedTensor(kind, tuple(tensor.shape), kept.numel(), comes_back))
    trace._kept.append(kept)


def _local(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # The result of a collective that has not been waited for has no storage of its own yet.
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
