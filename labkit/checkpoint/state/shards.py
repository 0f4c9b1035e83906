"""The local boxes of a tensor that one rank holds, whether it is a plain tensor, a DTensor or FSDP1's ShardedTensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate

from labkit.checkpoint.files.plain_tensors import plain_tensor, unsavable
from labkit.checkpoint.index.layout import Box, Placement, ShardDim, local_box


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A box of a tensor and this rank's data for it; ``data`` shares memory with the live tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor as one rank sees it.

    Attributes:
        shape: The full shape.
        dtype: The dtype.
        shards: The shards that this rank holds; empty boxes are left out unless the whole tensor is empty.
        replica_of: A label shared by all ranks with the same boxes, which must hold equal values; None if no other rank has these
            boxes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[LocalShard, ...]
    replica_of: str | None


def local_tensor(tensor: torch.Tensor) -> LocalTensor:
    """Return this rank's part of a tensor.

    Raises:
        UnsavableStateError: It is a DTensor that is an unreduced partial sum, or whose data do not match its placements; or
            :func:`~labkit.checkpoint.files.plain_tensors.plain_tensor` refuses the tensor.

    Ranks: local.
    """
    if isinstance(tensor, DTensor):
        return _of_dtensor(tensor)
    if isinstance(tensor, ShardedTensor):
        shards = [
            LocalShard(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes), shard.tensor.detach())
            for shard in tensor.local_shards()
        ]
        return LocalTensor(tuple(tensor.size()), tensor.dtype, _kept(tuple(tensor.size()), shards), None)
    data = plain_tensor(tensor)
    shape = tuple(tensor.shape)
    return LocalTensor(shape, tensor.dtype, (LocalShard((0,) * len(shape), shape, data),), "all")


def _of_dtensor(tensor: DTensor) -> LocalTensor:
    if any(placement.is_partial() for placement in tensor.placements):
        raise unsavable(f"is a DTensor with placements {tensor.placements}, an unreduced sum; redistribute it first")
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalTensor(shape, tensor.dtype, (), None)
    local = tensor.to_local().detach()
    offsets, sizes = box_of(tensor)
    if sizes != tuple(local.shape):
        what = f"is a DTensor of shape {shape} with placements {tensor.placements} on a mesh of {tuple(mesh.shape)}, should hold"
        raise unsavable(f"{what} {sizes} on this rank, but holds {tuple(local.shape)}")
    shard = LocalShard(offsets, sizes, local)
    label = None
    if any(isinstance(placement, Replicate) for placement in tensor.placements):
        place = tuple(
            at for at, placement in zip(coordinate, tensor.placements, strict=True) if not isinstance(placement, Replicate)
        )
        label = f"mesh {sorted(mesh.mesh.reshape(-1).tolist())} {mesh.mesh.shape} {tensor.placements} at {place}"
    return LocalTensor(shape, tensor.dtype, _kept(shape, [shard]), label)


def placement_of(placement: Any) -> Placement:
    """Convert a DTensor placement to one of :mod:`labkit.checkpoint.index.layout`.

    Raises:
        TypeError: It is neither a shard nor a replica.
    """
    kind = type(placement).__name__  # in torch 2.11 _StridedShard is a subclass of Shard, in 2.13 it is not
    if kind == "Replicate":
        return None
    if kind in ("Shard", "_StridedShard"):
        return ShardDim(placement.dim, strided=kind == "_StridedShard")
    raise TypeError(f"{placement} does not say which part of a tensor a rank holds")


def box_of(tensor: DTensor) -> Box:
    """Return this rank's box of a tensor; the rank must be in its mesh. The box and the local tensor may differ in size.

    torch's own arithmetic (``__create_chunk_list__``, which DCP uses) is wrong for some sizes that two axes split unevenly: for 7
    rows over ``(dp=3, tp=2)`` it gives one rank a row that does not exist, and for 13 rows its boxes overlap. So this function
    computes the layouts of fully_shard and parallelize_module itself, and leaves other strides and placements to torch.

    Raises:
        UnsavableStateError: This rank holds several boxes.

    Ranks: local.
    """
    mesh_shape, coordinate = tensor.device_mesh.shape, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    try:
        cuts = [placement_of(placement) for placement in tensor.placements]
    except TypeError:
        return _torchs_box(tensor)
    for axis, cut in enumerate(cuts):
        if cut is not None and cut.strided:
            further = zip(mesh_shape[axis + 1 :], cuts[axis + 1 :], strict=True)
            to_the_right = math.prod(size for size, other in further if other is not None and other.dim == cut.dim)
            if getattr(tensor.placements[axis], "split_factor", 0) != to_the_right:
                return _torchs_box(tensor)
    return local_box(tensor.shape, mesh_shape, coordinate, cuts)


def _torchs_box(tensor: DTensor) -> Box:
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise unsavable(f"is a DTensor with placements {tensor.placements}, which has {len(chunks)} local boxes, not one")
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)


def _kept(shape: tuple[int, ...], shards: list[LocalShard]) -> tuple[LocalShard, ...]:
    whole_is_empty = 0 in shape
    return tuple(shard for shard in shards if whole_is_empty or 0 not in shard.sizes)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of a kind that :func:`local_tensor` accepts."""
    return isinstance(value, torch.Tensor | ShardedTensor)


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor that may be divided over ranks."""
    return isinstance(value, DTensor | ShardedTensor)
