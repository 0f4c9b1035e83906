"""Notebook 06's checks accept the notebook's own solutions and refuse plausible wrong answers, with a fitting hint."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import labkit
from labkit.checkpoint import Reader, migrate, open_checkpoint, verify
from labkit.course.labs import lab06
from labkit.course.labs.lab06.cases import _without_witness
from labkit.errors import ExerciseError
from labkit.spmd import build_model
from tests.matrix import matrix
from tests.notebooks.exercises import defined_by, exercise_cell

NOTEBOOK = "06_checkpoint_forensics"
TRAIN_AND_SAVE = """
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from labkit.spmd import BatchSampler, Block, build_model, shard_model, train
model = shard_model(build_model(seed=0), init_device_mesh("cpu", (world_size,)), blocks=Block)
optimizer = torch.optim.AdamW(model.parameters())
batches = BatchSampler(batch_size=12, seq_len=32, seed=0, rank=rank, world_size=world_size)
for name in ("early", "late"):
    train(model, optimizer, batches, 1)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / name)
"""


@pytest.fixture(scope="module", params=matrix(2, 1, 4))
def planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The cases on checkpoints of one, two and four ranks, with another seed for each."""
    folder = tmp_path_factory.mktemp("lab06")
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        pool.push(folder=folder)
        pool.run_cell(TRAIN_AND_SAVE)
        cases = lab06.plant(pool, folder / "early", folder / "late", folder, seed=request.param)
    export = folder / "export.safetensors"
    migrate(folder / "late", export, only=["model"])
    return SimpleNamespace(cases=cases, folder=folder, export=export, model=build_model(seed=1))


def solved(planted: SimpleNamespace, name: str) -> Any:
    """The value that the notebook's exercise cell sets ``name`` to."""
    cell = exercise_cell(NOTEBOOK, f"{name} = ")
    tools = {
        "Counter": Counter,
        "Reader": Reader,
        "shutil": shutil,
        "build_model": build_model,
        "migrate": migrate,
        "open_checkpoint": open_checkpoint,
    }
    namespace = {**vars(planted), **tools, "seed": 0, "torch": torch, "verify": verify}
    return defined_by(cell, name, **namespace)


def test_what_is_wrong_is_not_shown_with_the_cases(planted: SimpleNamespace) -> None:
    secrets = (planted.cases._short_file, planted.cases._stale_file, *planted.cases._not_finite, *planted.cases._lost_state)
    assert all(secret not in repr(planted.cases) for secret in secrets)


def test_planting_leaves_the_good_checkpoint_and_the_optimizer_alone(planted: SimpleNamespace) -> None:
    assert verify(planted.cases.good, model=planted.model, finite=True).findings == []
    for case in (planted.cases.lost_state, planted.cases.wrapped, planted.cases.stale):
        assert not any(finding.code == "not-finite" for finding in verify(case, finite=True).findings)


def test_step_counters_tell_an_old_file_that_has_some_of_them_and_the_planted_one_is_silent(
    planted: SimpleNamespace, tmp_path: Path
) -> None:
    files = sorted(path.name for path in planted.cases.good.glob("*.distcp"))
    silent = _without_witness(planted.cases.good, files)
    assert planted.cases._stale_file in silent
    for file in files:
        shutil.copytree(planted.cases.good, tmp_path / file)
        shutil.copy2(planted.folder / "early" / file, tmp_path / file / file)
        codes = [finding.code for finding in verify(tmp_path / file, model=planted.model, finite=True).findings]
        assert codes == ([] if file in silent else ["uneven-steps"])


def test_planting_again_after_an_interrupt_and_more_training_gives_the_same_cases(tmp_path: Path) -> None:
    folders = {"early": tmp_path / "early", "late": tmp_path / "late", "folder": tmp_path, "seed": 0}
    with labkit.WorkerPool(1, device="cpu") as pool:
        for path in ("early", "late"):
            (tmp_path / path).mkdir()
        with pytest.raises(ExerciseError, match=r"no trained model on the ranks.* pool\.push"):
            lab06.plant(pool, **folders)
        pool.push(folder=tmp_path)
        pool.run_cell(TRAIN_AND_SAVE)
        first = lab06.plant(pool, **folders)
        shutil.rmtree(tmp_path / "e")
        (tmp_path / "e").mkdir()
        pool.run_cell("_ = train(model, optimizer, batches, 1)")
        assert lab06.plant(pool, **folders) == first
        assert lab06.check_repair(first, _migrated(first.wrapped, tmp_path / "repaired"), build_model()).startswith("Solved")
        pool.restart()
        with pytest.raises(ExerciseError, match="After a restart the ranks are empty"):
            lab06.plant(pool, **folders)


def _migrated(source: Path, target: Path, **options: Any) -> Path:
    migrate(source, target, **options)
    return target


# Exercise 1 ----------------------------------------------------------------------------------------------------------


def test_short_file_of_the_notebook_passes(planted: SimpleNamespace) -> None:
    file, missing = solved(planted, "short_file"), solved(planted, "missing_bytes")
    assert lab06.check_short_file(planted.cases, file, missing).startswith(f"Solved: {file} has ")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda size, missing: size, "This is what the file has. What should it have?"),
        (lambda size, missing: size + missing, "This is what it should have. How much of that is there?"),
        (lambda size, missing: missing - 1, "where it starts and how long it is"),
        (lambda size, missing: 0, "where it starts and how long it is"),
        (lambda size, missing: str(missing), "missing_bytes is '[0-9]+', a text, not a number"),
        (lambda size, missing: [missing], "a list, not a number"),
        (lambda size, missing: None, "missing_bytes is None"),
    ],
)
def test_wrong_number_of_missing_bytes_is_refused(planted: SimpleNamespace, wrong: Any, says: str) -> None:
    file, missing = solved(planted, "short_file"), solved(planted, "missing_bytes")
    size = (planted.cases.short / file).stat().st_size
    with pytest.raises(ExerciseError, match=says.replace("?", r"\?")):
        lab06.check_short_file(planted.cases, file, wrong(size, missing))


NO_FILES = [
    (lambda right, folder: None, "not set yet"),
    (lambda right, folder: 3, "A name is a text, and this is an int"),
    (lambda right, folder: [right], "It is one file: give the name alone"),
    (lambda right, folder: {right: 5}, "It is one file: give the name alone"),
    (lambda right, folder: ".metadata", "The index is in order. Which data file"),
    (lambda right, folder: str(folder / right), "its name as a text, not its path"),
    (lambda right, folder: Path(right), "its name as a text, not its path"),
    (lambda right, folder: "rank 1", r"is not a file of [ad]\.\nTarget: one of __0_0\.distcp[^\n]*$"),
]


@pytest.mark.parametrize(("wrong", "says"), NO_FILES)
def test_what_is_no_file_is_refused(planted: SimpleNamespace, wrong: Any, says: str) -> None:
    cases = planted.cases
    with pytest.raises(ExerciseError, match=says):
        lab06.check_short_file(cases, wrong(cases._short_file, cases.short), 1)
    with pytest.raises(ExerciseError, match=says):
        lab06.check_stale_file(cases, wrong(cases._stale_file, cases.stale))


def test_wrong_file_is_refused(planted: SimpleNamespace) -> None:
    for path in planted.cases.short.glob("*.distcp"):
        if path.name != solved(planted, "short_file"):
            with pytest.raises(ExerciseError, match="has all of its"):
                lab06.check_short_file(planted.cases, path.name, 1)


# Exercise 2 ----------------------------------------------------------------------------------------------------------


def test_poisoned_of_the_notebook_passes(planted: SimpleNamespace) -> None:
    assert lab06.check_not_finite(planted.cases, solved(planted, "poisoned")).startswith("Solved: optimizer.state.")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda right, every: set(), "only when asked: finite=True"),
        (lambda right, every: every, "Which of yours are finite in every element"),
        (lambda right, every: {name for name in right if name.endswith("exp_avg")}, "inf is not finite either"),
        (lambda right, every: {"model." + name.split("state.")[1].rpartition(".")[0] for name in right}, "one of its moments"),
        (lambda right, every: {name.split("state.")[1].rpartition(".")[0] for name in right}, "one of its moments"),
        (lambda right, every: {name.removeprefix("optimizer.state.") for name in right}, "with 'optimizer.state.' in front"),
    ],
)
def test_wrong_poisoned_is_refused(planted: SimpleNamespace, wrong: Any, says: str) -> None:
    every = set(open_checkpoint(planted.cases.not_finite).tensors)
    with pytest.raises(ExerciseError, match=says):
        lab06.check_not_finite(planted.cases, wrong(solved(planted, "poisoned"), every))


# Exercise 3 ----------------------------------------------------------------------------------------------------------


def test_without_moments_of_the_notebook_passes(planted: SimpleNamespace) -> None:
    assert lab06.check_lost_state(planted.cases, solved(planted, "without_moments")).startswith(
        "Solved: all 9 parameters of block "
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda right: set(), "verify reports no-state for each"),
        (lambda right: {f"optimizer.state.{name}" for name in right}, "without 'optimizer.state.' in front"),
        (lambda right: {f"model.{name}" for name in right}, "without 'model.'"),
        (lambda right: right | {"norm.weight"}, "Some of these have their moments"),
        (lambda right: right | {"head.weight", "rope_cos", "rope_sin"}, "Not all of these are parameters"),
        (lambda right: {min(right).split(".attention")[0]}, "A block is not a parameter"),
        (lambda right: {min(right)}, "Whole blocks are frozen together"),
    ],
)
def test_wrong_without_moments_is_refused(planted: SimpleNamespace, wrong: Any, says: str) -> None:
    with pytest.raises(ExerciseError, match=says):
        lab06.check_lost_state(planted.cases, wrong(solved(planted, "without_moments")))


def test_one_text_or_nothing_is_no_set_of_names(planted: SimpleNamespace) -> None:
    with pytest.raises(ExerciseError, match="None is not a set of names"):
        lab06.check_not_finite(planted.cases, None)  # type: ignore[arg-type]
    with pytest.raises(ExerciseError, match="one text is not a set of names"):
        lab06.check_lost_state(planted.cases, "norm.weight")


# Exercise 4 ----------------------------------------------------------------------------------------------------------


def test_stale_file_of_the_notebook_passes(planted: SimpleNamespace) -> None:
    file = solved(planted, "stale_file")
    assert lab06.check_stale_file(planted.cases, file).startswith(f"Solved: {file} is from an earlier step, and no other")


def test_wrong_stale_file_is_refused(planted: SimpleNamespace) -> None:
    right = solved(planted, "stale_file")
    for file in sorted(path.name for path in planted.cases.stale.glob("*.distcp")):
        if file != right:
            with pytest.raises(ExerciseError, match="A chunk knows its file"):
                lab06.check_stale_file(planted.cases, file)


# Exercise 5 ----------------------------------------------------------------------------------------------------------


def test_repaired_of_the_notebook_passes(planted: SimpleNamespace) -> None:
    repaired = solved(planted, "repaired")
    line = lab06.check_repair(planted.cases, repaired, planted.model)
    shutil.rmtree(repaired)
    assert line == "Solved: 119 tensors under the model's own names, 87 of them moments, equal bit for bit."


@pytest.mark.parametrize("planted", [2], indirect=True)
def test_a_repair_of_another_name_passes(planted: SimpleNamespace, tmp_path: Path) -> None:
    fixed = _migrated(planted.cases.wrapped, tmp_path / "fixed")
    for path in (fixed, str(fixed)):
        assert lab06.check_repair(planted.cases, path, planted.model).startswith("Solved")


@pytest.mark.parametrize("planted", [2], indirect=True)
def test_wrong_repairs_are_refused(planted: SimpleNamespace, tmp_path: Path) -> None:
    cases, model = planted.cases, planted.model
    shutil.copytree(cases.wrapped, tmp_path / "copy")
    shutil.copytree(cases.good, tmp_path / "copy of the good")
    (tmp_path / "empty").mkdir()
    for path, says in (
        (None, "repaired is a NoneType, not a path"),
        (migrate(cases.wrapped, tmp_path / "result"), "migrate returns what it wrote"),
        ({"model": {}}, "repaired is a dict, not a path"),
        (cases.good, "late is one of the given checkpoints"),
        (cases.wrapped, "e is one of the given checkpoints"),
        (tmp_path / "nothing", "there is nothing at"),
        (tmp_path / "empty", "empty does not open"),
        (tmp_path / "copy", "Names still carry the wrapper's"),
        (tmp_path / "copy of the good", "lacks the case's 'run_name'.*\n.*\n.*not from the good checkpoint"),
        (_migrated(cases.good, tmp_path / "good"), "lacks the case's 'run_name'"),
        (_migrated(cases.not_finite, tmp_path / "another case"), "Was it made from the case"),
        (_migrated(cases.lost_state, tmp_path / "without moments"), "The optimizer's state belongs to it"),
        (_migrated(cases.wrapped, tmp_path / "weights", drop=["optimizer.*"]), "It holds no optimizer state"),
        (_migrated(cases.wrapped, tmp_path / "weights.safetensors", only=["model"]), "Safetensors hold the model only"),
        (_migrated(cases.wrapped, tmp_path / "fixed.pt"), "dcp.load does not read fixed.pt.*\n.*\n.*without one it writes DCP's"),
    ):
        with pytest.raises(ExerciseError, match=says):
            lab06.check_repair(cases, path, model)
