"""The travelling checkpoint: notebook 01 leaves the same one that later notebooks make if it is missing."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import labkit
from labkit.checkpoint import verify
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.travelling import CourseRun, course_checkpoint, leave_checkpoint
from labkit.spmd.shards.parity import compare

QUICK = CourseRun(seed=3, batch_size=4, seq_len=8, num_steps=1)
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_composable_checkpointing.ipynb"


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def find(folder: str) -> str:
    return str(course_checkpoint(QUICK, Path(folder)))


def weights_moved(place: str) -> int:
    model = build_model(seed=QUICK.seed)
    dcp.load({"model": model.state_dict()}, checkpoint_id=place, no_dist=True)
    return len(compare(model, build_model(seed=QUICK.seed)).differences)


def test_a_missing_checkpoint_is_made_once_and_found_afterwards(pool: labkit.WorkerPool, tmp_path: Path) -> None:
    place = Path(pool.run(find, str(tmp_path)).same())
    assert place == tmp_path / QUICK.name
    assert [path.name for path in tmp_path.iterdir()] == [QUICK.name]  # no draft is left
    assert verify(place, model=build_model(device="meta")).ok
    assert pool.run(weights_moved, str(place))[0] >= 23  # every matrix, and norms that left one
    table = (place / ".metadata").stat().st_mtime_ns
    assert pool.run(find, str(tmp_path)).same() == str(place)
    assert (place / ".metadata").stat().st_mtime_ns == table


def train_as_notebook_01(folder: str) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    from labkit.spmd import BatchSampler, Block, shard_model, train

    rank, size = dist.get_rank(), dist.get_world_size()
    run = CourseRun(seed=3, batch_size=12, seq_len=8, num_steps=2)
    model = shard_model(build_model(seed=run.seed), init_device_mesh("cpu", (size,)), blocks=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate)
    batches = BatchSampler(batch_size=12, seq_len=8, seed=run.seed, rank=rank, world_size=size)
    for _ in range(2):  # a save between two steps changes nothing
        train(model, optimizer, batches, 1)
        weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/second")
    course_checkpoint(run, Path(folder))


def test_it_holds_the_bits_that_the_training_of_notebook_01_gives(pool: labkit.WorkerPool, tmp_path: Path) -> None:
    pool.run(train_as_notebook_01, str(tmp_path))
    name = CourseRun(seed=3, batch_size=12, seq_len=8, num_steps=2).name
    report = verify(tmp_path / name, against=tmp_path / "second")
    assert report.findings == []
    assert report.checked["compared tensors"] > 100


def test_what_lies_under_the_runs_name_stays_and_says_so_and_half_a_checkpoint_is_refused(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "left"
    source.mkdir()
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        leave_checkpoint(source, QUICK, folder)
    outcomes = []
    for table, data in ((b"1", b"weights"), (b"2", b"weights"), (b"3", b"other weights")):
        (source / ".metadata").write_bytes(table)
        (source / "__0_0.distcp").write_bytes(data)
        left = leave_checkpoint(source, QUICK, folder)
        outcomes.append(left.outcome)
        # Another notebook may be reading it.
        assert ((left.place / ".metadata").read_bytes(), (left.place / "__0_0.distcp").read_bytes()) == (b"1", b"weights")
    assert outcomes == ["new", "same", "other"]
    assert "remove its folder to replace it" in str(left)
    assert [path.name for path in folder.iterdir()] == [QUICK.name]


def test_the_defaults_are_the_parameters_of_notebook_01() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", ())]
    values = {
        ast.unparse(line.targets[0]): ast.literal_eval(line.value)
        for line in ast.parse(source).body
        if isinstance(line, ast.Assign)
    }
    assert CourseRun() == CourseRun(
        values["seed"], values["batch_size"], values["seq_len"], 2 * values["num_steps"], values["learning_rate"]
    )
