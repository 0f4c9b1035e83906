"""Unwrapping of a tensor's data, without torch.distributed, which imports sympy."""

from __future__ import annotations

import re

import torch
from torch.nn.parameter import is_lazy

from labkit.checkpoint.errors import STATE, UnsavableStateError

_UNWRITTEN = re.compile(r"torch\.(u?int[1-7]|bits.*|qu?int.*)")


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's data as a plain tensor in the same memory: no parameter or other subclass, and no gradient.

    Raises:
        UnsavableStateError: It is sparse, quantized, nested, on meta, a wrapper, or of a dtype that DCP does not write.

    Ranks: local.
    """
    if is_wrapper(tensor):
        kind = "nested tensor" if tensor.is_nested else type(tensor).__qualname__
        raise unsavable(f"is a {kind}, made of other tensors; save those")
    if tensor.device.type == "meta" or is_lazy(tensor):
        raise unsavable(f"is a {'meta' if tensor.device.type == 'meta' else 'lazy'} tensor, which has no data yet")
    if tensor.layout is not torch.strided:
        raise unsavable(f"is a tensor of layout {tensor.layout}; save its indices and values, or tensor.to_dense()")
    if tensor.is_quantized:
        raise unsavable("is a quantized tensor; save tensor.int_repr() with its scale and zero point")
    if _UNWRITTEN.fullmatch(str(tensor.dtype)):
        raise unsavable(f"is of dtype {tensor.dtype}, which torch's checkpoints do not take; save tensor.view(torch.uint8)")
    return tensor.detach().as_subclass(torch.Tensor)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor wraps other tensors, so that it has no memory of its own."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.is_nested


def to_cpu(data: torch.Tensor, *, copy: bool) -> torch.Tensor:
    """Return a shard's data as a CPU tensor whose storage holds nothing else; with ``copy`` it is independent of the live tensor.

    Conjugate and negative bits are applied to the data, since torch.save would otherwise store them separately.
    """
    on_cpu = data.detach().to("cpu", copy=copy).resolve_conj().resolve_neg()
    if on_cpu.untyped_storage().nbytes() != on_cpu.nbytes:
        on_cpu = on_cpu.clone()
    return on_cpu


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a CPU tensor in C order, as a flat uint8 tensor."""
    flat = tensor.contiguous()
    # A tensor with one element is contiguous whatever its stride, but view() still checks the stride.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def unsavable(problem: str) -> UnsavableStateError:
    """Return the error for a value; the caller adds the value's name."""
    return UnsavableStateError(STATE, [problem])
