"""Placement arithmetic: which box of a tensor a rank holds, computed without a process group or a mesh object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_DIMS = 64  # the limit of torch's operations and of numpy's arrays
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ShardDim:
    """A mesh axis that shards one tensor dim.

    Attributes:
        dim: The tensor dim; negative counts from the end.
        strided: True for torch's ``_StridedShard``: axes to the right of this one shard the dim first (FSDP2 over TP).
    """

    dim: int
    strided: bool = False


Placement = ShardDim | None  # None replicates over the axis


def split(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return the offset and size of part ``index`` of a dim split as :func:`torch.chunk` splits it; later parts may be empty."""
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(step, length - start)


def local_box(shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]) -> Box:
    """Return the box of a tensor that the rank at a mesh coordinate holds.

    Args:
        shape: The tensor's full shape.
        mesh_shape: The size of each mesh axis, outermost first.
        coordinate: The rank's coordinate on each axis.
        placements: The placement of the tensor on each axis.

    Returns:
        Offsets and sizes, one number per dim.

    Ranks: local.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    axes = [axis for axis, placement in enumerate(placements) if placement is not None]
    plain = [axis for axis in axes if not _strided(placements[axis])]
    late = [axis for axis in reversed(axes) if _strided(placements[axis])]
    for axis in plain + late:
        placement = placements[axis]
        assert placement is not None
        dim = placement.dim % len(shape)
        start, size = split(sizes[dim], mesh_shape[axis], coordinate[axis])
        offsets[dim] += start
        sizes[dim] = size
    return tuple(offsets), tuple(sizes)


def _strided(placement: Placement) -> bool:
    return placement is not None and placement.strided


def coordinate_of(rank: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's coordinate in a mesh that numbers its ranks in row-major order."""
    coordinate = []
    for size in reversed(mesh_shape):
        rank, at = divmod(rank, size)
        coordinate.append(at)
    return tuple(reversed(coordinate))


def is_shape(shape: Sequence[object]) -> bool:
    """Return whether a torch tensor can have this shape: at most 64 sizes, none negative, and strides that fit into 64 bits."""
    if len(shape) > _MOST_DIMS:
        return False
    step = 1
    for size in shape:
        if type(size) is not int or size < 0:
            return False
        step *= max(size, 1)
    return step < 1 << 63


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides are those of C order; dims of size 1 and empty tensors do not matter."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many storage elements a strided tensor spans, from its first element to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
