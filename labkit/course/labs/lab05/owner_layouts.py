"""The layouts of exercise 1 in notebook 05, with the right answers: real tensors on the pool, and larger meshes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from labkit.course.labs.checks import Pool, from_cell
from labkit.spmd.shards.layouts import Split, splits_of

Shape = tuple[int, int]
Grid = tuple[tuple[int, ...], ...]

COPY, ROWS, COLUMNS, ROWS_STRIDED = Split(None), Split(0), Split(1), Split(0, strided=True)
_PRETENDED_GRIDS: tuple[Grid, ...] = (
    ((0, 1), (2, 3)),
    ((0, 1, 2), (3, 4, 5)),
    ((0, 1), (2, 3), (4, 5)),
    ((0, 1, 2, 3),),
    ((4, 0, 2), (1, 5, 3)),  # not numbered row by row
)
_SHAPES: tuple[Shape, ...] = ((6, 4), (12, 5), (7, 5), (3, 2))


@dataclass(frozen=True)
class OwnerCase:
    """A layout, and which rank really holds what.

    Attributes:
        shape: Rows and columns of the tensor.
        grid: The ranks of the mesh, one tuple per coordinate on its first axis.
        splits: The split of each axis.
        boxes: Per rank, its first row and column, and its numbers of rows and columns.
    """

    shape: Shape
    grid: Grid
    splits: tuple[Split, Split]
    boxes: dict[int, tuple[Shape, Shape]]

    def owners(self, row: int, col: int) -> set[int]:
        """Return the ranks that hold an element."""
        return {
            rank
            for rank, ((top, left), (rows, cols)) in self.boxes.items()
            if top <= row < top + rows and left <= col < left + cols
        }

    @property
    def elements(self) -> list[Shape]:
        """All places of the tensor."""
        return list(product(range(self.shape[0]), range(self.shape[1])))


def real_cases(pool: Pool) -> list[OwnerCase]:
    """Return layouts of DTensors on this pool, read from the ranks. Ranks: controller."""
    return _merged(pool.run(_real_cases))


def pretended_cases(pool: Pool) -> list[OwnerCase]:
    """Return layouts on meshes of any size, computed by torch's arithmetic. Ranks: controller."""
    cases: list[OwnerCase] = pool.run(_pretended_cases, ranks=[0])[0]
    return cases


def _pretended_cases() -> list[OwnerCase]:
    """Return layouts on meshes larger than the pool, computed by torch's own arithmetic for one coordinate."""
    import torch.distributed.tensor as dt
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as local_part
    from torch.distributed.tensor.placement_types import _StridedShard

    cases = []
    for grid, shape in product(_PRETENDED_GRIDS, _SHAPES):
        down, across = len(grid), len(grid[0])
        for splits in [*product((COPY, ROWS, COLUMNS), repeat=2), (ROWS_STRIDED, ROWS), (ROWS, ROWS_STRIDED)]:
            if splits[0].strided and shape[0] % across:
                continue
            # If the second axis cuts after the first, torch writes two plain shards.
            placements: list[Any] = [
                dt.Replicate()
                if split.dim is None
                else _StridedShard(split.dim, split_factor=across)
                if split.strided and axis == 0
                else dt.Shard(split.dim)
                for axis, split in enumerate(splits)
            ]
            boxes: dict[int, tuple[Shape, Shape]] = {}
            for i, j in product(range(down), range(across)):
                sizes, offsets = local_part(shape, (down, across), [i, j], placements)
                boxes[grid[i][j]] = ((offsets[0], offsets[1]), (sizes[0], sizes[1]))
            cases.append(OwnerCase(shape, grid, (splits[0], splits[1]), boxes))
    return cases


def _real_cases() -> list[Any]:
    """Return the grid and this rank's records of real two-axis tensors, cut by hand and by TP and FSDP2."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from labkit.spmd.shards.tables import shard_table

    device, world_size = from_cell("device"), from_cell("world_size")
    across = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world_size // across, across), mesh_dim_names=("dp", "tp"))
    tensors: dict[str, Any] = {}
    for number, placements in enumerate(product((Replicate(), Shard(0), Shard(1)), repeat=2)):
        tensors[f"by hand {number}"] = distribute_tensor(torch.zeros(7, 5, device=device), mesh, list(placements))
    if across > 1:
        pair = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 3, bias=False)).to(device)
        parallelize_module(pair, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(pair, mesh=mesh["dp"])
        tensors |= dict(pair.named_parameters())
    return [mesh.mesh.tolist(), shard_table(tensors)]


def _merged(real: Any) -> list[OwnerCase]:
    grid = tuple(tuple(row) for row in real[0][0])
    cases = []
    for index, first in enumerate(real[0][1]):
        splits = splits_of(first.placements)
        boxes: dict[int, tuple[Shape, Shape]] = {}
        for rank, (_, records) in real.items():
            for chunk in records[index].chunks:
                boxes[rank] = ((chunk.offsets[0], chunk.offsets[1]), (chunk.sizes[0], chunk.sizes[1]))
        cases.append(OwnerCase((first.shape[0], first.shape[1]), grid, (splits[0], splits[1]), boxes))
    return cases
