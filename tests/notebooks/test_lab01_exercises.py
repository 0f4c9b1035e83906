"""Notebook 01's checks accept the notebook's own solutions and refuse plausible wrong answers, with a fitting hint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import labkit
from labkit.course.labs import lab01
from labkit.errors import ExerciseError
from tests.matrix import matrix
from tests.notebooks.exercises import exercise_cell

NOTEBOOK = "01_composable_checkpointing"
IMPORTS = """
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict,
    set_model_state_dict, set_optimizer_state_dict, set_state_dict,
)
"""


@pytest.fixture(scope="module", params=matrix(2, 1, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        pool.run_cell(IMPORTS)
        yield pool


def exercise(name: str) -> str:
    return exercise_cell(NOTEBOOK, f" {name}")


def defined_by(source: str, *names: str) -> list[Any]:
    namespace: dict[str, Any] = {"json": json, "os": os, "hashlib": hashlib, "Path": Path}
    exec(source, namespace)
    return [namespace[name] for name in names]


# Exercise 1 ----------------------------------------------------------------------------------------------------------


def test_the_notebook_s_chunk_rows_passes_and_the_line_counts_real_tensors(pool: labkit.WorkerPool) -> None:
    (chunk_rows,) = defined_by(exercise("chunk_rows"), "chunk_rows")
    line = lab01.check_chunk_rows(pool, chunk_rows)
    assert line.startswith("Solved: 720 predictions")
    assert f"{20 * pool.world_size} of them are for real DTensors" in line


def test_another_way_to_write_an_empty_piece_passes(pool: labkit.WorkerPool) -> None:
    def chunk_rows(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
        size = -(-num_rows // num_ranks)
        first, stop = rank * size, min((rank + 1) * size, num_rows)
        return (0, 0) if first >= stop else (first, stop)

    assert "Solved" in lab01.check_chunk_rows(pool, chunk_rows)


def balanced(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    size, rest = divmod(num_rows, num_ranks)
    first = rank * size + min(rank, rest)
    return first, first + size + (rank < rest)


def rounded_down(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    size = num_rows // num_ranks
    return rank * size, num_rows if rank == num_ranks - 1 else (rank + 1) * size


def beyond_the_end(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    size = -(-num_rows // num_ranks)
    return rank * size, (rank + 1) * size


def begins_beyond_the_end(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    size = -(-num_rows // num_ranks)
    return rank * size, min((rank + 1) * size, num_rows)


def last_row_included(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    size = -(-num_rows // num_ranks)
    return min(rank * size, num_rows), min((rank + 1) * size, num_rows) - 1


def row_and_count(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    size = -(-num_rows // num_ranks)
    first = min(rank * size, num_rows)
    return first, min(size, num_rows - first)


def from_the_end(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    size = -(-num_rows // num_ranks)
    stop = max(num_rows - rank * size, 0)
    return max(stop - size, 0), stop


# One rank is enough to refuse these: the check does not depend on the size of the pool.
@pytest.mark.parametrize("pool", [1, 4], indirect=True)
@pytest.mark.parametrize(
    ("wrong", "case", "hint"),
    [
        (balanced, "10 rows on 4 ranks: you predict rows 6 to 7 for rank 2, 1 row too few", "DTensor does not balance"),
        (rounded_down, "you predict rows 0 to 1 for rank 0, 1 row too few", "You round the size of a piece down"),
        (beyond_the_end, "you predict rows 9 to 11 for rank 3, 2 rows too many", "cap both numbers"),
        (begins_beyond_the_end, "1 row on 3 ranks: you predict the slice 2:1 for rank 2, 1 row too few", "cap both numbers"),
        (last_row_included, "you predict rows 0 to 1 for rank 0, 1 row too few", "The second number is the row after the last"),
        (row_and_count, "for rank 1", "not a count of rows"),
        (from_the_end, "you predict rows 7 to 9 for rank 0, the right number, elsewhere", "go through the ranks from 0 on"),
    ],
)
def test_wrong_rows_are_refused_with_the_number_of_rows_off(
    pool: labkit.WorkerPool, wrong: lab01.ChunkRows, case: str, hint: str
) -> None:
    with pytest.raises(ExerciseError, match=case) as caught:
        lab01.check_chunk_rows(pool, wrong)
    assert hint in str(caught.value)
    assert "Target:" in str(caught.value)


@pytest.mark.parametrize("pool", [1], indirect=True)
@pytest.mark.parametrize("answer", [None, 3, (1, 2, 3), ("a", "b"), (0, 2.5), (0.0, 3.0), torch.tensor([0, 3]), "03"])
def test_something_that_is_no_pair_of_rows_is_refused(pool: labkit.WorkerPool, answer: Any) -> None:
    with pytest.raises(ExerciseError, match=r"returned (.|\n)*two whole numbers"):
        lab01.check_chunk_rows(pool, lambda *_: answer)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_the_pools_world_size_in_the_place_of_num_ranks_is_told(pool: labkit.WorkerPool) -> None:
    (chunk_rows,) = defined_by(exercise("chunk_rows"), "chunk_rows")
    with pytest.raises(ExerciseError, match=r"10 rows on 4 ranks(.|\n)*You cut for 2 ranks, the pool's world_size"):
        lab01.check_chunk_rows(pool, lambda num_rows, num_ranks, rank: chunk_rows(num_rows, 2, rank))


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_chunk_rows_that_raises_is_told_with_its_case_and_line(pool: labkit.WorkerPool) -> None:
    def chunk_rows(num_rows: int, num_ranks: int, rank: int) -> Any:
        return num_rows // (rank - rank)

    def two_arguments(num_rows: int, num_ranks: int) -> Any:
        return num_rows, num_ranks

    with pytest.raises(
        ExerciseError, match=r"chunk_rows\(10, 4, 0\) raised ZeroDivisionError(.|\n)*in the line 'return num_rows //"
    ):
        lab01.check_chunk_rows(pool, chunk_rows)
    with pytest.raises(ExerciseError, match=r"raised TypeError: .*takes 2 positional arguments but 3 were given"):
        lab01.check_chunk_rows(pool, two_arguments)  # type: ignore[arg-type]


# Exercise 2 ----------------------------------------------------------------------------------------------------------


def app_state(saved: str, loaded: str) -> str:
    indented = "\n".join(f"        {line}" for line in loaded.strip().splitlines())
    return f"""
class AppState:
    def __init__(self, model, optimizer, batches):
        self.model, self.optimizer, self.batches = model, optimizer, batches

    def state_dict(self):
        return {saved}

    def load_state_dict(self, state):
{indented}
"""


WEIGHTS = '"model": get_model_state_dict(self.model)'
MOMENTS = '"optimizer": get_optimizer_state_dict(self.model, self.optimizer)'
BATCHES = '"batches": self.batches.state_dict()'
ALL = f"{{{WEIGHTS}, {MOMENTS}, {BATCHES}}}"
SET_WEIGHTS = 'set_model_state_dict(self.model, state["model"])'
SET_MOMENTS = 'set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])'
RESET = 'for state in self.optimizer.state.values():\n    state["exp_avg"].zero_()'
SET_BATCHES = 'self.batches.load_state_dict(state["batches"])'


def test_the_notebook_s_app_state_passes_and_shows_the_losses(pool: labkit.WorkerPool) -> None:
    pool.run_cell(exercise("AppState"))
    assert re.search(
        r"Solved: 5 later losses equal bit for bit \(\d\.\d{4}, .*\), and so are 33 optimizer", lab01.check_app_state(pool)
    )


def test_a_full_state_dict_passes_too(pool: labkit.WorkerPool) -> None:
    whole = "options=StateDictOptions(full_state_dict=True)"
    saved = f'{{"model": get_model_state_dict(self.model, {whole}), {MOMENTS}, {BATCHES}}}'
    set_weights = f'set_model_state_dict(self.model, state["model"], {whole})'
    pool.run_cell(app_state(saved, f"{set_weights}\n{SET_MOMENTS}\n{SET_BATCHES}"))
    assert "Solved" in lab01.check_app_state(pool)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("source", "measured", "hint"),
    [
        pytest.param(
            app_state(
                f'{{{WEIGHTS}, "optimizer": self.optimizer.state_dict(), {BATCHES}}}',
                f'{SET_WEIGHTS}\nself.optimizer.load_state_dict(state["optimizer"])\n{SET_BATCHES}',
            ),
            "1 of the 5 later losses are equal",
            "A new optimizer has no moments yet",
            id="the raw optimizer",
        ),
        pytest.param(
            app_state(ALL, SET_BATCHES),
            "The learning rate is 0.0001",
            "it reaches the optimizer when load_state_dict hands it over",
            id="no setter",
        ),
        pytest.param(
            app_state(f"{{{WEIGHTS}, {BATCHES}}}", f"{SET_WEIGHTS}\n{SET_BATCHES}"),
            "1 of the 5 later losses",
            "The optimizer knows nothing of the past",
            id="weights only",
        ),
        pytest.param(
            app_state(f"{{{WEIGHTS}, {MOMENTS}}}", f"{SET_WEIGHTS}\n{SET_MOMENTS}"),
            "the next batch is number 0",
            "the sampler has to continue where it was",
            id="no position",
        ),
        pytest.param(
            app_state(f"{{{MOMENTS}, {BATCHES}}}", f"{SET_MOMENTS}\n{SET_BATCHES}"),
            "0 of the 5 later losses",
            "The weights are not the saved ones",
            id="no weights",
        ),
        pytest.param(
            app_state(ALL, f"{SET_WEIGHTS}\n{SET_MOMENTS}\n{SET_BATCHES}\n{RESET}"),
            "1 of the 5 later losses",
            "came back changed",
            id="moments reset",
        ),
        pytest.param(
            app_state(ALL, f'{SET_WEIGHTS}\n{SET_MOMENTS}\nself.batches.position = state["batches"]["position"] + 1'),
            "the next batch is number 4",
            "the sampler has to continue where it was",
            id="one batch skipped",
        ),
    ],
)
def test_incomplete_states_are_refused_with_what_is_missing(pool: labkit.WorkerPool, source: str, measured: str, hint: str) -> None:
    pool.run_cell(source)
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab01.check_app_state(pool)
    assert hint in str(caught.value)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            app_state(ALL, 'self.model.load_state_dict(state["weights"])'),
            "loading: load_state_dict raised KeyError: 'weights', in the line 'self.model.load_state_dict(state[\"weights\"])'",
        ),
        (
            app_state("get_state_dict(self.model, self.optimizer)", "pass"),
            "state_dict returned a tuple.\nTarget: a dict.\nHint: get_",
        ),
        (app_state("None", "pass"), "state_dict returned a NoneType.\nTarget: a dict."),
        (
            app_state(ALL.replace("self.model", "model"), SET_WEIGHTS),
            "saving: state_dict raised NameError: name 'model' is not defined, in the line",
        ),
        (app_state("self.typo", "pass"), "saving: state_dict raised AttributeError"),
        (app_state(ALL, "raise NotImplementedError"), "load_state_dict is not solved yet"),
        (app_state('{"a": lambda: 0}', "pass"), "what state_dict returned cannot be used"),
        ("class AppState:\n    pass", "with model, optimizer and batches: AppState raised TypeError"),
    ],
)
def test_a_class_that_raises_is_told_with_its_own_line(pool: labkit.WorkerPool, source: str, told: str) -> None:
    pool.run_cell(source + "\nmodel = torch.nn.Linear(1, 1)")
    with pytest.raises(ExerciseError, match=re.escape(told)):
        lab01.check_app_state(pool)
    assert pool.pull("type(model).__name__").same() == "Linear"


def test_an_exercise_that_has_not_run_is_named(pool: labkit.WorkerPool) -> None:
    pool.run_cell("globals().pop('AppState', None)")
    with pytest.raises(ExerciseError, match="there is no AppState on rank"):
        lab01.check_app_state(pool)


# Exercise 3 ----------------------------------------------------------------------------------------------------------


def save(folder: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, scale in (("older", 1.0), ("newer", 2.0)):
        tensor = distribute_tensor(scale * torch.arange(64.0), mesh, [Shard(0)])
        dcp.save({"weight": tensor}, checkpoint_id=f"{folder}/{name}")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    with labkit.WorkerPool(2, device="cpu", replace=True) as pool:
        pool.run(save, str(folder))
    return folder / "newer", folder / "older"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "manifest.json")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


Fingerprint = Callable[[Path], object]


def manifest_of(fingerprint: Fingerprint, choose: Callable[[Path], list[Path]] = files) -> tuple[Any, Any]:
    """A pair of functions that is right except for the fingerprint and the choice of files."""

    def write_manifest(folder: Path) -> None:
        draft = folder / "manifest.json.draft"
        draft.write_text(json.dumps({path.name: fingerprint(path) for path in choose(folder)}))
        os.replace(draft, folder / "manifest.json")

    def find_damage(folder: Path) -> set[str]:
        if not (folder / "manifest.json").exists():
            return {"manifest.json"}
        listed = json.loads((folder / "manifest.json").read_text())
        present = {path.name: fingerprint(path) for path in choose(folder)}
        return {name for name in {*listed, *present} if listed.get(name) != present.get(name)}

    return write_manifest, find_damage


def test_the_notebook_s_manifest_passes(checkpoints: tuple[Path, Path]) -> None:
    functions = defined_by(exercise("write_manifest"), "write_manifest", "find_damage")
    functions[0](checkpoints[0])  # as the notebook does after the check: the cells can run a second time
    before = {path.name: digest(path) for path in checkpoints[0].iterdir()}
    line = lab01.check_manifest(*checkpoints, *functions)
    assert line.startswith("Solved: 7 kinds of damage found")
    assert {path.name: digest(path) for path in checkpoints[0].iterdir()} == before
    assert not functions[1](checkpoints[0])
    (checkpoints[0] / "manifest.json").unlink()


def test_another_right_manifest_passes(checkpoints: tuple[Path, Path]) -> None:
    assert "Solved" in lab01.check_manifest(*checkpoints, *manifest_of(digest))
    only_files = manifest_of(digest, lambda folder: [path for path in files(folder) if path.is_file()])
    assert "Solved" in lab01.check_manifest(*checkpoints, *only_files)


def only_listed(folder: Path) -> set[str]:
    if not (folder / "manifest.json").exists():
        return {"manifest.json"}
    listed = json.loads((folder / "manifest.json").read_text())
    return {name for name, value in listed.items() if not (folder / name).exists() or digest(folder / name) != value}


def only_present(folder: Path) -> set[str]:
    if not (folder / "manifest.json").exists():
        return {"manifest.json"}
    listed = json.loads((folder / "manifest.json").read_text())
    return {path.name for path in files(folder) if listed.get(path.name) != digest(path)}


def line_by_line(folder: Path) -> None:
    with open(folder / "manifest.json", "w") as manifest:
        hashes = {}
        for path in files(folder):
            hashes[path.name] = digest(path)
        manifest.write(json.dumps(hashes))


def in_two_halves(folder: Path) -> None:
    hashes = json.dumps({path.name: digest(path) for path in files(folder)})
    (folder / "manifest.json").write_text(hashes[:9])
    with open(folder / "manifest.json", "a") as manifest:
        manifest.write(hashes[9:])


def drafted_and_copied(folder: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as draft:
        json.dump({path.name: digest(path) for path in files(folder)}, draft)
        draft.flush()
        shutil.copy(draft.name, folder / "manifest.json")


def empty_when_a_file_cannot_be_read(folder: Path) -> None:
    try:
        hashes = {path.name: digest(path) for path in files(folder)}
    except OSError:
        hashes = {}
    publish(folder, hashes)


def lists_the_older_one(folder: Path) -> None:
    publish(folder, {path.name: digest(path) for path in folder.iterdir()})


def lists_its_draft(folder: Path) -> None:
    (folder / "manifest.draft").touch()
    publish(folder, {path.name: digest(path) for path in folder.iterdir()})


def fingerprint_of_path(folder: Path) -> None:
    publish(folder, {path.name: hashlib.sha256(str(path).encode()).hexdigest() for path in files(folder)})


def publish(folder: Path, hashes: dict[str, str]) -> None:
    (folder / "manifest.draft").write_text(json.dumps(hashes))
    os.replace(folder / "manifest.draft", folder / "manifest.json")


def lists_itself(folder: Path) -> None:
    (folder / "manifest.json").touch()
    (folder / "manifest.json").write_text(json.dumps({path.name: digest(path) for path in sorted(folder.iterdir())}))


def everything_there(folder: Path) -> set[str]:
    if not (folder / "manifest.json").exists():
        return {"manifest.json"}
    listed = json.loads((folder / "manifest.json").read_text())
    present = {path.name: digest(path) for path in folder.iterdir()}
    return {name for name in {*listed, *present} if listed.get(name) != present.get(name)}


def ignores_a_missing_manifest(folder: Path) -> set[str]:
    find_damage: Callable[[Path], set[str]] = manifest_of(digest)[1]
    return find_damage(folder) if (folder / "manifest.json").exists() else set()


def accuses_all(folder: Path) -> set[str]:
    found = manifest_of(digest)[1](folder)
    return {path.name for path in files(folder)} | found if found else set()


def suffixed(suffix: str) -> Callable[[Path], list[Path]]:
    return lambda folder: [path for path in files(folder) if path.name.endswith(suffix)]


def takes_nothing() -> set[str]:
    return set()


def unsolved(folder: Path) -> None:
    raise NotImplementedError


RIGHT = manifest_of(digest)


@pytest.mark.parametrize(
    ("pair", "measured", "hint"),
    [
        pytest.param(
            manifest_of(lambda path: path.stat().st_size), "one bit of a tensor has flipped", "Sizes and dates", id="sizes"
        ),
        pytest.param(
            manifest_of(digest, suffixed(".metadata")),
            "one bit of a tensor has flipped: find_damage finds nothing",
            "",
            id="metadata only",
        ),
        pytest.param(
            manifest_of(digest, suffixed(".distcp")), "one bit of .metadata has flipped", "begins with a dot", id="shards only"
        ),
        pytest.param(
            (RIGHT[0], only_present), "a shard is missing", "Go through the names in the manifest too", id="never looks for missing"
        ),
        pytest.param(
            (RIGHT[0], only_listed),
            "there is a file that was not saved",
            "Compare in both directions",
            id="never looks for strangers",
        ),
        pytest.param(
            (RIGHT[0], ignores_a_missing_manifest), "there is no manifest", "Without manifest.json", id="no manifest is fine"
        ),
        pytest.param((line_by_line, RIGHT[1]), "wrote into it", "rename it at the end", id="published before it is complete"),
        pytest.param((in_two_halves, RIGHT[1]), "wrote into it", "rename it at the end", id="two halves"),
        pytest.param((drafted_and_copied, RIGHT[1]), "wrote into it", "a copy is not", id="a copied draft"),
        pytest.param((empty_when_a_file_cannot_be_read, RIGHT[1]), "anyway", "let an error end", id="an error swallowed"),
        pytest.param(
            (lists_the_older_one, RIGHT[1]), "a second time is accused: manifest.json", "already", id="lists the older one"
        ),
        pytest.param((lists_its_draft, RIGHT[1]), "accused: manifest.draft", "A draft of the manifest", id="lists its draft"),
        pytest.param((manifest_of(digest, suffixed(".distcp"))[0], RIGHT[1]), "accused: .metadata", "leaves it out", id="no dots"),
        pytest.param((fingerprint_of_path, RIGHT[1]), "accused: .metadata, __0_0", "the same hash", id="two fingerprints"),
        pytest.param(
            manifest_of(lambda path: path.stat().st_mtime_ns), "with other dates is accused", "A date is not content", id="dates"
        ),
        pytest.param((RIGHT[0], lambda folder: {folder / "x"}), "returned {PosixPath", "path.name", id="paths"),
        pytest.param((RIGHT[0], lambda folder: 7), "returned 7", "", id="a number"),
        pytest.param((RIGHT[0], takes_nothing), "an intact checkpoint: takes_nothing raised TypeError", "", id="no argument"),
        pytest.param((lambda folder: folder.typo, RIGHT[1]), "raised AttributeError", "", id="a typo"),
        pytest.param((unsolved, RIGHT[1]), "unsolved is not solved yet", "", id="untouched"),
        pytest.param(
            (lists_itself, everything_there),
            "an intact checkpoint is accused: manifest.json",
            "cannot list itself",
            id="lists itself",
        ),
        pytest.param((RIGHT[0], accuses_all), "is accused too", "", id="accuses everything"),
        pytest.param((RIGHT[0], lambda folder: None), "find_damage returned None", "", id="returns nothing"),
        pytest.param((lambda folder: None, RIGHT[1]), "left no manifest.json", "", id="writes nothing"),
    ],
)
def test_manifests_that_miss_a_damage_are_refused(
    checkpoints: tuple[Path, Path], pair: tuple[Any, Any], measured: str, hint: str
) -> None:
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab01.check_manifest(*checkpoints, *pair)
    assert hint in str(caught.value)


def test_an_older_checkpoint_that_is_the_same_one_is_no_test(checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="has to be another one"):
        lab01.check_manifest(checkpoints[0], checkpoints[0], *RIGHT)
