"""Layouts of ranks on a mesh, and of tensors on its axes: plain data without torch, so that the kernel can draw them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

_SHARD = re.compile(r"(_Strided)?Shard\(dim=(\d+)")
_REPLICATE = re.compile(r"Replicate\(\)")


# Names of axes over which FSDP shards dim 0 of every parameter.
DATA_AXES = ("dp", "fsdp", "shard", "dp_shard", "data")


class Split(NamedTuple):
    """The effect of one mesh axis on a tensor.

    Attributes:
        dim: The dim that the axis splits; None if each rank of the axis has a copy.
        strided: Whether it is a ``_StridedShard``, which means that axes further right split this dim first. FSDP2 over TP creates
            these.
    """

    dim: int | None
    strided: bool = False


@dataclass(frozen=True)
class MeshRecord:
    """A device mesh as plain data.

    Attributes:
        axes: Name of each axis, outermost first; ``""`` if the mesh has no names.
        shape: Number of ranks along each axis.
        ranks: The ranks in row-major order, in which the last axis varies fastest.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape) or prod(self.shape) != len(self.ranks):
            raise ValueError(f"axes {self.axes}, shape {self.shape} and {len(self.ranks)} ranks do not match")

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of a rank, one number per axis.

        Raises:
            ValueError: The rank is not on the mesh.
        """
        rest, place = self.ranks.index(rank), []
        for size in reversed(self.shape):
            rest, at = divmod(rest, size)
            place.append(at)
        return tuple(reversed(place))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return the process groups of one axis: ranks whose coordinates differ only along this axis.

        Raises:
            ValueError: The mesh has no such axis.
        """
        if axis not in self.axes:
            raise ValueError(f"the mesh has no axis {axis!r}, only {', '.join(self.axes)}")
        across = self.axes.index(axis)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            place = self.coordinate(rank)
            found.setdefault((*place[:across], *place[across + 1 :]), []).append(rank)
        return [tuple(group) for group in found.values()]


def parse_mesh(text: str) -> dict[str, int]:
    """Parse ``dp=4,tp=2`` into axis names and sizes, outermost first.

    Raises:
        ValueError: The text is not of this form.
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name or not re.fullmatch("[1-9][0-9]{0,8}", size) or name in mesh:
            raise ValueError(f"cannot read the mesh {text!r} at {part!r}. Write it like dp=4,tp=2.")
        mesh[name] = int(size)
    return mesh


def splits_of(placements: Sequence[str]) -> tuple[Split, ...]:
    """Parse placements as torch writes them and as a `ShardRecord` keeps them.

    Args:
        placements: One per mesh axis, such as ``("_StridedShard(dim=0, sf=2)", "Shard(dim=1)")``.

    Raises:
        ValueError: A placement is neither a shard nor a replica, for example a partial sum.
    """
    splits = []
    for text in placements:
        if shard := _SHARD.match(text):
            splits.append(Split(int(shard[2]), strided=shard[1] is not None))
        elif _REPLICATE.match(text):
            splits.append(Split(None))
        else:
            raise ValueError(f"{text} does not say which part of a tensor a rank holds")
    return tuple(splits)
