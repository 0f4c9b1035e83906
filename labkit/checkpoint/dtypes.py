"""Conversions between dtypes, and whether they keep every value."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labkit.checkpoint.errors import CheckpointError

# Exponent bits, explicit mantissa bits.
_FLOATS = {
    torch.float64: (11, 52),
    torch.float32: (8, 23),
    torch.float16: (5, 10),
    torch.bfloat16: (8, 7),
    torch.float8_e4m3fn: (4, 3),
    torch.float8_e5m2: (5, 2),
}
_SIGNED = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}
_UNSIGNED = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
_COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def is_lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether every value of one dtype can be represented exactly in another.

    float32 to float64 is lossless. Not lossless are float16 to bfloat16 (mantissa), bfloat16 to float16 (range), int64 to float64,
    and any number to bool.
    """
    if source == target:
        return True
    if source in _FLOATS and target in _FLOATS:
        exponent, mantissa = _FLOATS[source]
        wider_exponent, wider_mantissa = _FLOATS[target]
        return exponent <= wider_exponent and mantissa <= wider_mantissa
    if source in _COMPLEX and target in _COMPLEX:
        return is_lossless(_COMPLEX[source], _COMPLEX[target])
    if source in _SIGNED and target in _SIGNED:
        return _SIGNED[source] <= _SIGNED[target]
    if source in _UNSIGNED and target in _UNSIGNED:
        return _UNSIGNED[source] <= _UNSIGNED[target]
    if source in _UNSIGNED and target in _SIGNED:
        return _UNSIGNED[source] < _SIGNED[target]
    return False


def parse_dtypes(texts: Sequence[str]) -> dict[str, torch.dtype]:
    """Parse texts such as ``*=bfloat16`` into patterns of names and the dtype for each.

    Raises:
        CheckpointError: A text cannot be parsed, or a pattern occurs twice.
    """
    found: dict[str, torch.dtype] = {}
    for text in texts:
        pattern, _, name = text.rpartition("=")
        dtype = getattr(torch, name, None)
        if not pattern or not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{text!r} (--dtype) is not PATTERN=DTYPE, such as '*=bfloat16'")
        if pattern in found:
            raise CheckpointError(f"the pattern {pattern!r} (--dtype) is given twice")
        found[pattern] = dtype
    return found


def is_convertible(target: torch.dtype) -> bool:
    """Return whether torch can convert numbers to a dtype; it cannot for quantized dtypes and those below 8 bits."""
    try:
        torch.zeros(1).to(target)
    except RuntimeError:
        return False
    return True


def convert(tensor: torch.Tensor, target: torch.dtype) -> tuple[torch.Tensor, str | None]:
    """Convert a tensor and check what happened to its values.

    Returns:
        The converted tensor, and a sentence if finite numbers became infinite or NaN, or integers changed; else None.
    """
    if tensor.dtype == target:
        return tensor, None
    converted = tensor.to(target)
    if is_lossless(tensor.dtype, target):
        return converted, None
    if target.is_floating_point or target.is_complex:
        lost = int((_finite(tensor) & ~_finite(converted)).sum())
        reason = f"{lost} finite values become inf or NaN in {target}" if lost else None
    else:
        changed = int((converted.to(tensor.dtype) != tensor).sum())
        reason = f"{changed} values change in {target}" if changed else None
    return converted, reason


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    # isfinite() has no float8 kernels; float32 holds every float8 value.
    return torch.isfinite(tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor)
