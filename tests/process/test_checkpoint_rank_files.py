"""Checkpoints that ranks wrote: one file per rank, DCP directories of sharded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from labkit.checkpoint import Reader, open_checkpoint, verify
from labkit.checkpoint.data.read import same_bits
from labkit.checkpoint.errors import IncompleteCheckpointError, UnsupportedTensorError
from tests.process.checkpoint_models import Net, fsdp1, fsdp2, plain_state, two_d
from tests.process.checkpoint_ranks import Launcher, launcher_fixture  # noqa: F401


def build(kind: str, world_size: int) -> torch.nn.Module:
    if kind == "fsdp2":
        return fsdp2(Net())
    if kind == "hsdp":
        return fsdp2(Net(), init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
    if kind == "2d":
        return two_d(Net(), world_size // 2, 2)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)) if kind == "fsdp1_mesh" else None
    return fsdp1(Net(), use_orig_params=kind != "fsdp1_flat", mesh=mesh)


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    if not isinstance(model, FSDP):
        return model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict()


def write(rank: int, kind: str, folder: str) -> None:
    model = build(kind, dist.get_world_size())
    state = {"model": state_of(model)}
    torch.save(state, f"{folder}/state_rank{rank}.pt")
    dcp.save(state, checkpoint_id=f"{folder}/dcp")


@pytest.mark.parametrize(
    ("kind", "world_size"), [("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4), ("2d", 4), ("fsdp1", 2), ("fsdp1_mesh", 2), ("fsdp1_flat", 3)]
)
def test_files_of_each_rank_and_dcp_give_the_whole_tensors(launcher: Launcher, tmp_path: Path, kind: str, world_size: int) -> None:
    launcher.run(write, world_size, tmp_path, kind, str(tmp_path))
    files = tmp_path / "state_rank{rank}.pt"
    for path in (files, tmp_path / "state_rank*.pt", tmp_path / "dcp"):
        checkpoint = open_checkpoint(path)
        expected = {f"model.{name}": tensor for name, tensor in plain_state().items()}
        assert set(checkpoint.tensors) == set(expected)
        with Reader(checkpoint) as reader:
            wrong = [key for key, tensor in expected.items() if not same_bits(reader.tensor(key), tensor)]
        assert wrong == []
    found = open_checkpoint(tmp_path / "state_rank*.pt")
    assert found.kind == "torch_ranks"
    assert found.ranks == {f"state_rank{rank}.pt": rank for rank in range(world_size)}
    assert found.missing_ranks == ()


def test_a_missing_rank_file_leaves_a_region_that_is_named(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(write, 2, tmp_path, "fsdp2", str(tmp_path))
    (tmp_path / "state_rank1.pt").unlink()
    (tmp_path / "files").mkdir()
    (tmp_path / "state_rank0.pt").rename(tmp_path / "files/state_rank0.pt")
    with (
        Reader(open_checkpoint(tmp_path / "files")) as reader,
        pytest.raises(IncompleteCheckpointError, match=r"embed\.weight.*20 of the 35"),
    ):
        reader.tensor("model.embed.weight")
    missing, uncovered = verify(tmp_path / "files").findings
    assert (missing.code, uncovered.code) == ("missing-rank", "uncovered")
    assert "there are files of rank 0, but none of rank 1" in missing.what
    assert "tensors lack elements" in uncovered.what
    assert "the file of a rank is missing. There are files of rank 0" in uncovered.what


def local(rank: int, use_orig_params: bool, folder: str) -> None:
    model = fsdp1(Net(), use_orig_params=use_orig_params)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), f"{folder}/local_rank{rank}.pt")


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_local_flat_parameters_are_listed_as_such(launcher: Launcher, tmp_path: Path, use_orig_params: bool) -> None:
    launcher.run(local, 2, tmp_path, use_orig_params, str(tmp_path))
    checkpoint = open_checkpoint(tmp_path)
    flat = [key for key, entry in checkpoint.tensors.items() if entry.flat]
    assert sorted(flat) == ["_flat_param", "block._flat_param"]
    assert all(len(checkpoint.tensors[key].chunks) == 2 for key in flat)
    with Reader(checkpoint) as reader:
        block = reader.tensor("block._flat_param")
    expected = plain_state()["block.0.weight"].reshape(-1)
    assert torch.equal(block[: expected.numel()], expected)


def partial(rank: int, folder: str) -> None:
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    torch.save({"p": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, f"{folder}/p_rank{rank}.pt")


def test_an_unreduced_dtensor_is_refused_by_name(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(partial, 2, tmp_path, str(tmp_path))
    checkpoint = open_checkpoint(tmp_path)
    assert [(finding.code, finding.where) for finding in verify(tmp_path).findings] == [("unsupported", "p")]
    with Reader(checkpoint) as reader, pytest.raises(UnsupportedTensorError, match=r"not supported: p: DTensor .* Partial"):
        reader.value("p")
