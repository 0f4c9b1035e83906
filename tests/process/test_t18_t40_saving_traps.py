"""Values that torch silently loses, mixes up or casts in saving and loading, and labkit's way around it.

Each test first shows the trap. If that part fails, torch has fixed it, and the trap can be removed; labkit's part stays.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

from labkit import checkpoint
from labkit.checkpoint.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    DtypeNarrowingError,
    FQNMismatchError,
    RankDivergenceError,
)
from labkit.checkpoint.index import manifest
from tests.process.checkpoint_ranks import Launcher, launcher_fixture  # noqa: F401


class FullDisk:
    """A stream that accepts a little and then has no space."""

    def __init__(self, stream: Any, room: int) -> None:
        self._stream, self._room = stream, room

    def write(self, data: Any) -> int:
        self._room -= len(memoryview(data).cast("B"))
        if self._room < 0:
            raise OSError(28, "No space left on device")
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def full_disk(patch: pytest.MonkeyPatch, room: int) -> None:
    """Make torch's and labkit's writers run out of space after ``room`` bytes of a shard."""
    from contextlib import contextmanager

    original = FileSystem.create_stream

    @contextmanager
    def create(self: Any, path: Any, mode: str) -> Any:
        with original(self, path, mode) as stream:
            yield FullDisk(stream, room) if str(path).endswith(".distcp") else stream

    patch.setattr(FileSystem, "create_stream", create)
    from labkit.checkpoint.write import dcp_writer

    opened = dcp_writer.HashedFile.__init__

    def init(self: Any, path: Path) -> None:
        opened(self, path)
        self._file = FullDisk(self._file, room)

    patch.setattr(dcp_writer.HashedFile, "__init__", init)


def test_t18_a_failing_save_destroys_the_last_checkpoint_in_torch_and_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.ones(5000)}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    checkpoint.save(tmp_path / "ours", state, 1)
    with monkeypatch.context() as patch:
        full_disk(patch, 4000)
        with pytest.raises(CheckpointException):
            dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
        with pytest.raises(CheckpointWriteError, match="No space left"):
            checkpoint.save(tmp_path / "ours", state, 2, keep=1)
    with pytest.raises(CheckpointException):  # the trap
        dcp.load({"a": torch.zeros(5000)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    target = {"a": torch.zeros(5000)}
    assert checkpoint.load(tmp_path / "ours", target).step == 1
    assert torch.equal(target["a"], state["a"])


def test_t19_a_writer_threads_error_is_lost_in_torch_and_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(5000), "b": torch.ones(10)}
    with monkeypatch.context() as patch:
        full_disk(patch, 4000)
        try:
            dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "theirs", thread_count=2), no_dist=True)
            reported = True
        except CheckpointException:
            reported = False  # by chance the failing file was the main thread's own
        with pytest.raises(CheckpointWriteError, match="No space left"):
            checkpoint.save(tmp_path / "ours", state, 1, threads=2)
    if reported:
        with pytest.raises(CheckpointException):  # the trap: the save was a success
            dcp.load({"a": torch.zeros(5000), "b": torch.zeros(10)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert manifest.complete_steps(tmp_path / "ours") == []


def different_values(rank: int, folder: str) -> Any:
    state = {"loss": torch.tensor([float(rank)])}
    dcp.save(state, checkpoint_id=f"{folder}/theirs")
    loaded = {"loss": torch.tensor([-1.0])}
    dcp.load(loaded, checkpoint_id=f"{folder}/theirs")
    with pytest.raises(RankDivergenceError, match=r"loss differs between rank 0 and rank 1"):
        checkpoint.save(f"{folder}/ours", state, 1)
    checkpoint.save(f"{folder}/ours", {"loss": checkpoint.PerRank(state["loss"])}, 1)
    mine = {"loss": checkpoint.PerRank(torch.tensor([-1.0]))}
    checkpoint.load(f"{folder}/ours", mine)
    return loaded["loss"].item(), mine["loss"].value.item()


def test_t20_values_that_differ_per_rank_collapse_in_torch_and_are_refused_or_keyed_here(
    launcher: Launcher, tmp_path: Path
) -> None:
    theirs, ours = zip(*launcher.run(different_values, 2, tmp_path, str(tmp_path)), strict=True)
    assert theirs[0] == theirs[1]  # the trap: 0 and 1 are right
    assert ours == (0.0, 1.0)


def test_t21_too_large_values_become_inf_in_torch_and_are_refused_here(tmp_path: Path) -> None:
    dcp.save({"a": torch.tensor([70000.0])}, checkpoint_id=tmp_path / "x", no_dist=True)
    target = {"a": torch.zeros(1, dtype=torch.float16)}
    dcp.load(target, checkpoint_id=tmp_path / "x", no_dist=True)
    assert target["a"].isinf().all()  # the trap
    target = {"a": torch.zeros(1, dtype=torch.float16)}
    with pytest.raises(DtypeNarrowingError, match=r"float32 in the checkpoint and torch\.float16 here"):
        checkpoint.load(tmp_path / "x", target)
    assert not target["a"].any()


def test_t23_keys_that_the_model_lacks_are_ignored_by_torch_and_reported_here(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1), "b": torch.ones(1)}, checkpoint_id=tmp_path / "x", no_dist=True)
    dcp.load({"a": torch.zeros(1)}, checkpoint_id=tmp_path / "x", no_dist=True)  # the trap: no word of b
    with pytest.raises(FQNMismatchError, match="unexpected in the checkpoint: b"):
        checkpoint.load(tmp_path / "x", {"a": torch.zeros(1)})


def test_t27_a_pointer_that_moved_too_early_loses_the_last_checkpoint_and_the_manifest_does_not(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.ones(3)}, 1)
    checkpoint.save(tmp_path, {"a": torch.full((3,), 2.0)}, 2)
    second = manifest.step_directory(tmp_path, 2)
    # A crash between the data and the marker: only the manifest is missing.
    (second / "manifest.json").unlink()
    target = {"a": torch.zeros(3)}
    assert checkpoint.load(tmp_path, target).step == 1
    assert target["a"].tolist() == [1.0, 1.0, 1.0]


def test_t39_an_error_of_dcp_escapes_except_exception_and_labkits_does_not(tmp_path: Path) -> None:
    assert not issubclass(CheckpointException, Exception)  # the trap
    assert issubclass(CheckpointWriteError, Exception)
    with pytest.raises(Exception, match="meta tensor"):
        checkpoint.save(tmp_path, {"a": torch.ones(1, device="meta")}, 1)


def test_t40_a_flipped_bit_a_foreign_shard_and_a_half_overwrite_load_in_torch_and_are_named_here(tmp_path: Path) -> None:
    values = {"a": torch.arange(100.0)}
    dcp.save(values, checkpoint_id=tmp_path / "x", no_dist=True)
    dcp.save({"a": torch.arange(100.0) * 3}, checkpoint_id=tmp_path / "y", no_dist=True)
    checkpoint.save(tmp_path / "ours", values, 1)
    ours = manifest.step_directory(tmp_path / "ours", 1)
    for folder in (tmp_path / "x", ours):
        shard = folder / "__0_0.distcp"
        data = bytearray(shard.read_bytes())
        data[data.find(values["a"].numpy().tobytes()) + 203] ^= 1
        shard.write_bytes(data)
    target = {"a": torch.zeros(100)}
    dcp.load(target, checkpoint_id=tmp_path / "x", no_dist=True)
    assert not torch.equal(target["a"], values["a"])  # the trap
    target = {"a": torch.zeros(100)}
    for folder in (tmp_path / "ours", tmp_path / "x"):  # by the manifest, and by the checksum that torch wrote
        with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
            checkpoint.load(folder, target)
    # Another checkpoint's shard; an overwrite that stopped before .metadata leaves the same.
    for folder in (tmp_path / "x", ours):
        shutil.copy(tmp_path / "y/__0_0.distcp", folder / "__0_0.distcp")
    dcp.load(target, checkpoint_id=tmp_path / "x", no_dist=True)
    assert torch.equal(target["a"], torch.arange(100.0) * 3)  # the trap
    with pytest.raises((CorruptCheckpointError, checkpoint.errors.IncompleteCheckpointError), match=r"__0_0\.distcp"):
        checkpoint.load(tmp_path / "ours", {"a": torch.zeros(100)})


def replicas(rank: int, folder: str) -> Any:
    """HSDP replicas from different seeds stay different, without an error in torch."""
    from torch.distributed.device_mesh import init_device_mesh

    from tests.process.checkpoint_models import Net, fsdp2

    model = fsdp2(Net(seed=rank), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/theirs")  # the trap: one replica's weights, no word
    with pytest.raises(RankDivergenceError, match="initialised with different seeds"):
        checkpoint.save(f"{folder}/ours", {"model": model}, 1)
    return dist.get_rank()


def test_t01_replicas_that_differ_are_refused_when_they_are_saved(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run(replicas, 2, tmp_path, str(tmp_path)) == [0, 1]


def fsdp1_over_tp(rank: int, folder: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    wrapped = FSDP(model, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(checkpoint.CheckpointMismatchError) as caught:
        checkpoint.save(folder, {"model": wrapped}, 1)
    return str(caught.value)


def test_t35_t36_fsdp1_over_tensor_parallelism_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    texts = launcher.run(fsdp1_over_tp, 4, tmp_path, str(tmp_path / "store"))
    assert all("Use fully_shard (FSDP2)" in text for text in texts)


def broadcast(rank: int, folder: str) -> list[bool]:
    """T24 and T38: an uneven 2D model, restored on other shardings without the setters that fail or hang."""
    from tests.process.checkpoint_models import Net, two_d

    model = two_d(Net(), 2, 2)
    checkpoint.save(folder, {"model": model}, 1)
    other = two_d(Net(3), 2, 2)
    checkpoint.load(folder, {"model": other})
    pairs = [(a.full_tensor(), b.full_tensor()) for a, b in zip(model.parameters(), other.parameters(), strict=True)]
    return [torch.equal(a, b) for a, b in pairs]


def test_t24_an_uneven_2d_model_is_restored_exactly(launcher: Launcher, tmp_path: Path) -> None:
    results = launcher.run(broadcast, 4, tmp_path, str(tmp_path / "store"))
    assert all(equal for result in results for equal in result)


def shared_moments(rank: int, folder: str) -> list[bool]:
    """T10: FSDP1's full optimizer state on the CPU, with its default offload, has one buffer for both moments."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    from tests.process.checkpoint_models import Net, fsdp1, train

    model = fsdp1(Net())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, 2)
    state = FSDP.full_optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save({"optim": state}, f"{folder}/full.pt")
    checkpoint.save(f"{folder}/ours", {"model": model, "optim": optimizer}, 1)
    return [True]


def test_t10_shared_moments_are_found_by_verify_and_never_saved_here(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(shared_moments, 2, tmp_path, str(tmp_path))
    found = {finding.code for finding in checkpoint.verify(tmp_path / "full.pt").findings}
    assert "shared-moments" in found  # the trap
    assert checkpoint.verify(tmp_path / "ours").findings == []
