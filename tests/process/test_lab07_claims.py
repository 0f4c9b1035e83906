"""Claims of notebook 07 about torch and gloo. If a new torch fails one of these tests, a sentence in the notebook is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import labkit
from labkit.checkpoint import CheckpointWriteError, save
from labkit.spmd.trace.gloo_links import can_measure_links, measure_links

PIECE = 1 << 18
HEADERS = 8_000  # gloo's own and those of two barriers, beside data of a MiB

pytestmark = pytest.mark.skipif(not can_measure_links(), reason="only Linux counts the bytes of a connection")


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(4, device="cpu", replace=True) as pool:
        yield pool


def links_of(kind: str, axis: str | None) -> dict[int, int]:
    warnings.simplefilter("ignore", FutureWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh.get_group(axis) if axis else dist.group.WORLD
    num = dist.get_world_size(group)
    piece, whole = torch.ones(PIECE // 4), torch.ones(num * PIECE // 4)
    with measure_links() as came:
        if kind == "all_gather":
            dist.all_gather_into_tensor(whole, piece, group=group)
        elif kind == "reduce_scatter":
            dist.reduce_scatter_tensor(piece, whole, group=group)
        elif kind == "all_reduce":
            dist.all_reduce(whole, group=group)
    return came


@pytest.mark.parametrize(("kind", "passes"), [("all_gather", 1), ("all_reduce", 2), ("reduce_scatter", 2), ("nothing", 0)])
@pytest.mark.parametrize("axis", [None, "shard", "replicate"])
def test_gloo_sends_in_a_ring_and_a_reduce_scatter_is_a_whole_all_reduce(
    pool: labkit.WorkerPool, kind: str, passes: int, axis: str | None
) -> None:
    groups = {None: [(0, 1, 2, 3)], "shard": [(0, 1), (2, 3)], "replicate": [(0, 2), (1, 3)]}[axis]
    for rank, came in pool.run(links_of, kind, axis).items():
        (group,) = (group for group in groups if rank in group)
        place = group.index(rank)
        neighbours = {group[place - 1], group[(place + 1) % len(group)]}
        expected = passes * PIECE * (len(group) - 1)
        assert expected <= sum(came.values()) <= expected + HEADERS
        assert all(size <= HEADERS for sender, size in came.items() if sender not in neighbours)


def save_hsdp(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))), mesh=mesh)
    dcp.save(model.state_dict(), checkpoint_id=folder)


def test_with_hsdp_no_node_writes_everything_and_nothing_is_written_twice(pool: labkit.WorkerPool, tmp_path: Path) -> None:
    pool.run(save_hsdp, tmp_path / "saved")
    metadata = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    nodes = {int(place.relative_path.split("_")[2]) // 2 for place in metadata.storage_data.values()}
    assert nodes == {0, 1}
    assert sum(place.length > 0 for place in metadata.storage_data.values()) == 8 * 2  # tensors, halves


def save_to_own_node(folder: Path) -> str:
    own = folder / f"node{dist.get_rank() // 2}"
    own.mkdir(exist_ok=True)
    model = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
    dcp.save(model.state_dict(), checkpoint_id=own / "torch")
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(model.state_dict(), checkpoint_id=own / "torch")
    with pytest.raises(CheckpointWriteError, match="one directory that their machines share"):
        save(own / "labkit", {"model": model}, step=1)
    return own.name


def test_a_node_s_own_directory_shows_at_torch_s_load_and_at_labkit_s_save(pool: labkit.WorkerPool, tmp_path: Path) -> None:
    assert list(pool.run(save_to_own_node, tmp_path).values()) == ["node0", "node0", "node1", "node1"]
    assert not list(tmp_path.rglob("step_*"))
    assert sorted(file.name for file in (tmp_path / "node1" / "torch").iterdir()) == ["__2_0.distcp", "__3_0.distcp"]
