"""Bytes that all ranks send inside and between nodes, computed from the collectives of one rank."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from labkit.plan.records import Traffic
from labkit.spmd.shards.layouts import MeshRecord
from labkit.spmd.trace.events import Collective


def traffic_of(calls: Iterable[Collective], mesh: MeshRecord, ranks_per_node: int) -> tuple[Traffic, ...]:
    """Sum up a step's collectives by kind and axis, sorted by bytes sent, most first.

    Args:
        calls: One rank's calls; every other rank makes the same calls on its own groups. ``group`` names the axis.
        mesh: The mesh of all ranks.
        ranks_per_node: Number of consecutive ranks that share a node.
    """
    grouped: dict[tuple[str, str], list[Collective]] = {}
    for call in calls:
        grouped.setdefault((call.kind, call.group), []).append(call)
    found = [_traffic(kind, axis, same, mesh, ranks_per_node) for (kind, axis), same in grouped.items()]
    return tuple(sorted(found, key=lambda each: -each.sent_bytes))


def _traffic(kind: str, axis: str, calls: list[Collective], mesh: MeshRecord, ranks_per_node: int) -> Traffic:
    groups = ranks_by_group(mesh, axis)
    nodes = groups // ranks_per_node
    # In a ring, each rank sends to the next rank in its group, and the last to the first.
    leaves = nodes != np.roll(nodes, -1, axis=1)
    sent_bytes = sum(call.sent_bytes for call in calls)
    most_leaving = int(np.bincount(nodes[leaves]).max()) if leaves.any() else 0
    return Traffic(
        kind,
        axis,
        groups.shape[1],
        max(len(np.unique(row)) for row in nodes),
        len(calls),
        sum(call.size_bytes for call in calls),
        sent_bytes,
        most_leaving * sent_bytes,
        int((~leaves).sum()) * sent_bytes,
        int(leaves.sum()) * sent_bytes,
    )


def ranks_by_group(mesh: MeshRecord, axis: str) -> npt.NDArray[np.int64]:
    """Return the process groups of an axis, one per row or, if the mesh has no such axis, one row with all ranks."""
    grid = np.array(mesh.ranks, dtype=np.int64).reshape(mesh.shape)
    if axis not in mesh.axes:
        return grid.reshape(1, -1)
    place = mesh.axes.index(axis)
    return np.moveaxis(grid, place, -1).reshape(-1, mesh.shape[place])
