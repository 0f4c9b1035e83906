"""Layouts of tensors on the mesh, and the box that each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from labkit.checkpoint.index.layout import Box, Placement, local_box
from labkit.checkpoint.state.shards import placement_of
from labkit.spmd.shards.layouts import MeshRecord

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """A tensor's shape and how it is split.

    Attributes:
        shape: The global shape.
        dtype: Its dtype.
        axes: The mesh axes that it is laid out on, outermost first; empty for a plain tensor, which every rank holds whole.
        placements: The placement on each of these axes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of a DTensor or a plain tensor. Ranks: local."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(shape, tensor.dtype)
        axes = tuple(tensor.device_mesh.mesh_dim_names or ())
        return cls(shape, tensor.dtype, axes, tuple(map(placement_of, tensor.placements)))

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    def boxes(self, mesh: MeshRecord) -> tuple[list[Box], Int64s]:
        """Return the distinct boxes that ranks hold, and each rank's index into them.

        `local_box` reproduces DTensor's arithmetic; every plan compares it with what the simulated ranks actually hold.
        """
        cutting = [(axis, place) for axis, place in zip(self.axes, self.placements, strict=True) if place is not None]
        sizes = [mesh.shape[mesh.axes.index(axis)] for axis, _ in cutting]
        placements = [place for _, place in cutting]
        found: dict[Box, int] = {}
        of_coordinate = [
            found.setdefault(self._box(sizes, coordinate, placements), len(found)) for coordinate in product(*map(range, sizes))
        ]
        return list(found), np.array(of_coordinate, dtype=np.int64)[_flat_coordinates(mesh, [axis for axis, _ in cutting])]

    def _box(self, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]) -> Box:
        offsets, sizes = local_box(self.shape, mesh_shape, coordinate, placements)
        # DTensor places an empty shard past the end, so all empty shards have the same box.
        placed = zip(offsets, sizes, self.shape, strict=True)
        return tuple(length if size == 0 else offset for offset, size, length in placed), sizes


def held_elements(layouts: Sequence[Layout], mesh: MeshRecord) -> Int64s:
    """Return, for every rank, how many elements of all these tensors it holds."""
    held = np.zeros(len(mesh.ranks), dtype=np.int64)
    counts: dict[Layout, int] = {}
    for layout in layouts:
        counts[layout] = counts.get(layout, 0) + 1
    for layout, count in counts.items():
        boxes, which = layout.boxes(mesh)
        held += count * np.array([prod(sizes) for _, sizes in boxes], dtype=np.int64)[which]
    return held


def _flat_coordinates(mesh: MeshRecord, axes: Sequence[str]) -> Int64s:
    """Return, for every rank, the row-major index of its coordinate on some axes."""
    places = np.unravel_index(np.arange(len(mesh.ranks)), mesh.shape)
    flat: Any = np.zeros(len(mesh.ranks), dtype=np.int64)
    for axis in axes:
        index = mesh.axes.index(axis)
        flat = flat * mesh.shape[index] + places[index]
    return flat  # type: ignore[no-any-return]
