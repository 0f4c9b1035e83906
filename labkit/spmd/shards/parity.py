"""Exact comparison of models, state dicts and optimizer dicts, plain or sharded, key by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.spmd.shards.records import Difference, Parity
from labkit.spmd.shards.tree import Path, leaves, path_text

State = nn.Module | Mapping[str, Any]


def compare(actual: State, expected: State, *, rtol: float | None = None, atol: float | None = None) -> Parity:
    """Compare two states: first the keys, then for each key type, shape, dtype, and values by ``torch.equal``.

    DTensors are gathered, so a sharded state can be compared with a plain or differently sharded one. Every rank gathers every
    DTensor of both sides before it compares values, since stopping at the first difference would leave the other ranks waiting in a
    collective. Gathered tensors are kept on the CPU, so each rank's host memory holds both states whole, but its device only one
    whole tensor at a time.

    Args:
        actual: A module (whose ``state_dict()`` is used) or a nested mapping of tensors and plain values.
        expected: The same, for the side known to be right.
        rtol: With ``atol``: compare floating-point tensors by ``torch.allclose``. Leave out both for exact comparison.
        atol: See ``rtol``.

    Returns:
        The result, which is true if the states are equal. With plain tensors, ranks may get different results.

    Raises:
        ValueError: No tensor with elements is present on both sides, so the comparison would say nothing.
        TypeError: A leaf is a ShardedTensor of FSDP1; gather its state dict first.

    Ranks: collective if either side holds DTensors; then each side must have the same keys on every rank.
    Blocks: as long as its gathers, one per DTensor.
    """
    left, right = _gathered(actual), _gathered(expected)
    common = [path for path in right if path in left]
    differences = [Difference(path_text(path), "missing", "is missing") for path in right if path not in left]
    differences += [Difference(path_text(path), "unexpected", "is not expected") for path in left if path not in right]
    for path in common:
        difference = _difference(path_text(path), left[path], right[path], rtol, atol)
        if difference is not None:
            differences.append(difference)
    tensors = [right[path] for path in common if isinstance(right[path], Tensor)]
    num_elements = sum(tensor.numel() for tensor in tensors)
    if not num_elements and not differences:
        raise ValueError(f"nothing to compare: none of {len(left)} and {len(right)} keys is a tensor with elements on both sides")
    return Parity(len(tensors), num_elements, len(common) - len(tensors), tuple(differences))


def require_equal(actual: State, expected: State) -> Parity:
    """Call `compare` and raise `ParityError` if the states differ. Ranks: as `compare`."""
    return compare(actual, expected).require()


def _gathered(state: State) -> dict[Path, Any]:
    return {path: _whole(path, leaf) for path, leaf in leaves(state)}


def _whole(path: Path, leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        leaf = leaf.full_tensor()
    if not isinstance(leaf, Tensor):
        if hasattr(leaf, "local_shards"):
            raise TypeError(
                f"{path_text(path)} is a {type(leaf).__name__}; gather it first, with StateDictOptions(full_state_dict=True)"
            )
        return leaf
    return leaf.detach().cpu()


def _difference(key: str, actual: Any, expected: Any, rtol: float | None, atol: float | None) -> Difference | None:
    if not (isinstance(actual, Tensor) and isinstance(expected, Tensor)):
        return _difference_of_values(key, actual, expected)
    if actual.shape != expected.shape:
        return Difference(key, "shape", f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        return Difference(key, "dtype", f"dtype {_dtype(actual)}, expected {_dtype(expected)}")
    if torch.equal(actual, expected):
        return None
    tolerant = (rtol is not None or atol is not None) and expected.is_floating_point()
    if tolerant and torch.allclose(actual, expected, rtol=rtol or 0.0, atol=atol or 0.0, equal_nan=True):
        return None
    return _difference_of_elements(key, actual, expected)


def _difference_of_values(key: str, actual: Any, expected: Any) -> Difference | None:
    if isinstance(actual, Tensor) or isinstance(expected, Tensor) or type(actual) is not type(expected):
        return Difference(key, "type", f"{_kind(actual)}, expected {_kind(expected)}")
    if actual == expected:
        return None
    return Difference(key, "value", f"{actual!r}, expected {expected!r}")


def _difference_of_elements(key: str, actual: Tensor, expected: Tensor) -> Difference:
    wide = torch.complex128 if expected.is_complex() else torch.float64
    differing = actual != expected
    gap = (actual.to(wide) - expected.to(wide)).abs()[differing]
    num = int(differing.sum())
    first = tuple(int(i) for i in differing.nonzero()[0])
    where = f"{num:,} of {differing.numel():,} elements differ, first at {first}, at most by"
    largest = float("nan") if bool(gap.isnan().any()) else float(gap.max())
    return Difference(key, "value", f"{where} {largest:.3g}", largest)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"
