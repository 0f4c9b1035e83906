"""A refusal ends with a next step, and the offered command is accepted exactly as written."""

from __future__ import annotations

import pickle
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.checkpoint import Reader, open_checkpoint, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import AmbiguousCheckpointError, CheckpointError, IncompleteCheckpointError

ONE = torch.ones(2, 2)


def refusal(*arguments: object) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    return result.output


@pytest.mark.parametrize(
    ("state", "key"),
    [({"w": ONE, "epoch": 3}, "."), ({"my model": {"w": ONE}, "epoch": 3}, "my model"), ({"it's": {"w": ONE}, "epoch": 3}, "it's")],
)
def test_the_key_that_a_refusal_says_to_keep_can_be_copied(tmp_path: Path, state: dict[str, Any], key: str) -> None:
    torch.save(state, tmp_path / "x.pt")
    text = refusal("migrate", tmp_path / "x.pt", tmp_path / "x.safetensors")
    (advice,) = re.findall(r"Say what to keep: (--only .*)\.\n", text)
    assert shlex.split(advice) == ["--only", key]
    result = CliRunner().invoke(command, ["migrate", str(tmp_path / "x.pt"), str(tmp_path / "x.safetensors"), *shlex.split(advice)])
    assert result.exit_code == 0, result.output
    assert set(load_file(tmp_path / "x.safetensors")) == {"w"}


def verl(root: Path) -> Path:
    for rank in range(2):
        root.mkdir(exist_ok=True)
        torch.save({"w": ONE}, root / f"model_world_size_2_rank_{rank}.pt")
        torch.save({"rng": rank}, root / f"extra_world_size_2_rank_{rank}.pt")
        torch.save({"state": {0: {"exp_avg": ONE[rank]}}}, root / f"optim_world_size_2_rank_{rank}.pt")
    return root


def test_several_kinds_of_rank_files_are_offered_with_the_place_of_the_rank(tmp_path: Path) -> None:
    root = verl(tmp_path / "verl")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        open_checkpoint(root)
    offered = [reading.split("  ")[0] for reading in caught.value.readings]
    assert offered == [f"{kind}_world_size_2_rank_{{rank}}.pt" for kind in ("extra", "model", "optim")]
    assert f"such as '{root / offered[0]}'." in str(caught.value)
    for name in offered:
        assert len(open_checkpoint(root / name).ranks) == 2
    parts = [part for name in offered for part in ("--part", f"{name[:5]}={name}")]
    result = CliRunner().invoke(command, ["show", str(root / offered[2])])
    assert result.exit_code == 0, result.output
    left = CliRunner().invoke(command, ["migrate", str(root), str(tmp_path / "new"), *parts[:4]])
    assert "no --part names it: optim_world_size_2_rank_{rank}.pt" in left.output


@pytest.mark.parametrize("names", [["step_1000.pt", "step_2000.pt"], ["a1_b2.pt", "a3_b4.pt"]])
def test_files_whose_numbers_may_be_no_ranks_are_offered_by_the_name_of_one(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        torch.save({"w": ONE * number}, tmp_path / name)
    save_file({"w": ONE}, tmp_path / "model.safetensors")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        open_checkpoint(tmp_path)
    for reading in caught.value.readings:
        open_checkpoint(tmp_path / reading.split("  ")[0])


def test_a_pattern_that_contradicts_the_names_or_the_files_is_not_offered(tmp_path: Path) -> None:
    for size, rank in ((2, 0), (2, 1), (4, 0)):
        torch.save({"w": ONE * size * 10 + rank}, tmp_path / f"model_world_size_{size}_rank_{rank}.pt")
    with pytest.raises(AmbiguousCheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert [reading for reading in caught.value.readings if "{" in reading] == [str(tmp_path / "model_world_size_2_rank_{rank}.pt")]


def test_one_folder_with_a_checkpoint_is_named_in_one_sentence(tmp_path: Path) -> None:
    dcp.save({"w": ONE}, checkpoint_id=tmp_path / "runs/step-100", no_dist=True)
    with pytest.raises(AmbiguousCheckpointError) as caught:
        open_checkpoint(tmp_path / "runs")
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/runs: it holds no checkpoint itself, but its folder step-100 does.",
        f"  - {tmp_path}/runs/step-100",
        f"Name that folder: '{tmp_path}/runs/step-100'.",
    ]


def broken(kind: str, root: Path) -> Path:
    if kind == "index":
        save_file({"a": ONE}, root / "m1.safetensors")
        (root / "m.safetensors.index.json").write_text('{"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}')
    elif kind == "torch index":
        torch.save({"a": ONE}, root / "m1.bin")
        (root / "m.bin.index.json").write_text('{"weight_map": {"a": "m1.bin", "b": "m2.bin"}}')
    elif kind == "numbered":
        save_file({"a": ONE}, root / "m-00001-of-00002.safetensors")
    elif kind in ("cut.pt", "cut.safetensors"):
        save_file({"a": ONE}, root / kind) if kind.endswith("s") else torch.save({"a": ONE}, root / kind)
        (root / kind).write_bytes((root / kind).read_bytes()[:-9])
    elif kind == "empty":
        (root / "x.pt").touch()
    else:
        dcp.save({"w": ONE}, checkpoint_id=root, no_dist=True)
        (root / ".metadata").unlink()
    return root


@pytest.mark.parametrize("kind", ["index", "torch index", "numbered", "cut.pt", "cut.safetensors", "empty", "no metadata"])
def test_what_is_missing_or_cut_off_is_refused_with_a_next_step(tmp_path: Path, kind: str) -> None:
    with pytest.raises(IncompleteCheckpointError, match=r"[^.]\. Copy it from where it was saved, or use an earlier checkpoint\.$"):
        open_checkpoint(broken(kind, tmp_path))


def test_files_that_no_reader_takes_are_named_once_and_decoration_is_not(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint-200"
    root.mkdir()
    save_file({"w": ONE}, root / "model.safetensors")
    for name in ("trainer_state.json", "config.json", "tokenizer.json", "README.md", "merges.txt", ".gitattributes"):
        (root / name).write_text("{}")
    result = CliRunner().invoke(command, ["migrate", str(root), str(tmp_path / "one")])
    assert [line for line in result.output.splitlines() if "left out" in line] == [
        "note: left out, since labkit reads no checkpoint from it: trainer_state.json"
    ]
    torch.save({"last_epoch": 3}, root / "scheduler.pt")
    torch.save({"x": 3}, root / "training_args.bin")
    parts = ["--part", "model=model.safetensors", "--part", "scheduler=scheduler.pt"]
    result = CliRunner().invoke(command, ["migrate", str(root), str(tmp_path / "two"), *parts])
    assert [line.split(": ", 2)[-1] for line in result.output.splitlines() if "left out" in line] == [
        "training_args.bin  (torch.save)",
        "trainer_state.json",
    ]
    with pytest.raises(CheckpointError, match="it holds 3 checkpoints"):
        open_checkpoint(root)


def nodes(root: Path, first: int, name: str = "ckpt_rank_{}.pt") -> Path:
    """Files of four ranks on two nodes, with numbers that continue, or that begin again on each node (``first`` is -1)."""
    for rank in range(4):
        (root / f"node{rank // 2}").mkdir(parents=True, exist_ok=True)
        number = rank % 2 if first < 0 else rank + first
        torch.save({"model": {"w": ONE}, "rank": rank}, root / f"node{rank // 2}" / name.format(number))
    return root


@pytest.mark.parametrize(("first", "place"), [(0, "{rank}"), (1, "{rank+1}")])
def test_files_of_ranks_on_several_nodes_are_offered_with_a_pattern_that_works(tmp_path: Path, first: int, place: str) -> None:
    root = nodes(tmp_path / "old", first)
    text = refusal("show", root)
    (pattern,) = re.findall(r"If their files are those of ranks, write '(.*)'\.", text)
    assert pattern == f"{root}/node*/ckpt_rank_{place}.pt"
    found = open_checkpoint(pattern)
    assert found.values["rank"].replicas == {rank: rank for rank in range(4)}


def test_files_that_begin_anew_on_each_node_have_to_be_renamed_and_no_pattern_is_offered(tmp_path: Path) -> None:
    text = refusal("show", nodes(tmp_path / "old", -1))
    assert "{rank}" not in text
    assert "no pattern tells them apart: rename them, or link them in one folder" in text


def test_a_folder_for_each_rank_is_offered_with_a_pattern_that_works(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"mp_rank_{rank:02}").mkdir()
        torch.save({"w": ONE}, tmp_path / f"mp_rank_{rank:02}/model_optim_rng.pt")
    (pattern,) = re.findall(r"those of ranks, write '(.*)'\.", refusal("show", tmp_path))
    assert open_checkpoint(pattern).ranks == {"mp_rank_00/model_optim_rng.pt": 0, "mp_rank_01/model_optim_rng.pt": 1}


def test_folders_of_steps_are_not_offered_as_those_of_ranks(tmp_path: Path) -> None:
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        torch.save({"w": ONE}, tmp_path / f"checkpoint-{step}/model.bin")
    assert "those of ranks" not in refusal("show", tmp_path)


def sharded(rank: int) -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    return DTensor.from_local(torch.full((1, 2), float(rank)), init_device_mesh("cpu", (4,)), [Shard(0)])


def test_sharded_files_that_begin_anew_on_each_node_are_offered_by_what_they_say_themselves(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"old/node{rank // 2}").mkdir(parents=True, exist_ok=True)
        torch.save({"model": {"weight": sharded(rank)}}, tmp_path / f"old/node{rank // 2}/ckpt_rank_{rank % 2}.pt")
        dist.destroy_process_group()
    (pattern,) = re.findall(r"those of ranks, write '(.*)'\.", refusal("show", tmp_path / "old"))
    assert pattern == f"{tmp_path}/old/node*/ckpt_rank_*.pt"
    with Reader(open_checkpoint(pattern)) as reader:
        assert torch.equal(reader.tensor("model.weight"), torch.arange(4.0).reshape(4, 1).expand(4, 2))
    wrong = refusal("show", tmp_path / "old/node{rank}/ckpt_rank_0.pt")
    assert "node1/ckpt_rank_0.pt says that rank 2 wrote it, but the path gives it rank 1" in wrong
    text = refusal("show", tmp_path / "old/node1")
    (pattern,) = re.findall(r"take the ranks from the files themselves: '(.*)'\.", text)
    assert open_checkpoint(pattern).ranks == {"ckpt_rank_0.pt": 2, "ckpt_rank_1.pt": 3}


def test_a_migration_of_half_of_the_ranks_names_the_missing_ones_first(tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    for rank in range(2):
        state = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"params": [0]}]}
        torch.save({"model": {"weight": sharded(rank)}, "optim": state}, tmp_path / f"node0/ckpt_rank_{rank}.pt")
        dist.destroy_process_group()
    model = tmp_path / "net.py"
    model.write_text("import torch\ndef build(): return torch.nn.Linear(2, 4, bias=False)\n")
    arguments = ("migrate", tmp_path / "node0", tmp_path / "new", "--model", f"{model}:build")
    assert "there are files of ranks 0-1, but none of ranks 2-3" in refusal(*arguments)
    assert "its pieces have 4 elements" in refusal(*arguments, "--despite", "missing-rank")


class Settings:
    """A user's own class, which no reader of checkpoints knows."""

    def __init__(self) -> None:
        self.rate = 0.1


@pytest.mark.parametrize("inside", [Settings(), {"deep": [Settings()]}])
def test_an_entry_that_asks_for_code_is_named_in_a_command_that_works(tmp_path: Path, inside: Any) -> None:
    torch.save({"model": {"w": ONE}, "my args": inside}, tmp_path / "x.pt")
    text = refusal("migrate", tmp_path / "x.pt", tmp_path / "new")
    (options,) = re.findall(r"\((--despite unsafe --drop .*)\)\.\n", text)
    result = CliRunner().invoke(command, ["migrate", str(tmp_path / "x.pt"), str(tmp_path / "new"), *shlex.split(options)])
    assert result.exit_code == 0, result.output
    assert set(open_checkpoint(tmp_path / "new").tensors) == {"model.w"}


def test_a_whole_module_is_to_be_saved_by_its_state_dict(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    text = refusal("migrate", tmp_path / "module.pt", tmp_path / "new")
    assert "It is a whole module." in text
    assert "save its state_dict() instead" in text
    assert "--drop" not in text
    torch.save({"model": torch.nn.Linear(2, 2), "epoch": 3}, tmp_path / "in.pt")
    text = refusal("migrate", tmp_path / "in.pt", tmp_path / "new")
    assert "--despite unsafe --drop 'model'" in text
    assert "save its state_dict() in place of model" in text


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1234\n", b"\n<HTML>404</HTML>"]
)
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "model.safetensors.index.json", ".metadata"])
def test_what_came_in_the_place_of_a_file_is_called_what_it_is(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    words = "a pointer of Git LFS" if content[:1] == b"v" else "a web page"
    for path in (tmp_path / name, tmp_path):
        if path.is_dir() and name.endswith("json"):
            continue  # other JSON files may be there
        told = CliRunner().invoke(command, ["verify", str(path)]).output
        assert words in told
        assert "cut off" not in told


def test_an_empty_directory_and_one_without_a_checkpoint_have_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "x.pt").mkdir()
    assert "x.pt: the directory holds no checkpoint, since it is empty. Name the one that holds the checkpoint" in refusal(
        "verify", tmp_path / "x.pt"
    )
    (tmp_path / "x.pt/notes.txt").write_text("x")
    assert "Name the file or the directory that holds it." in refusal("verify", tmp_path / "x.pt")


def test_keys_that_join_to_one_name_have_a_next_step(tmp_path: Path) -> None:
    torch.save({"dotted": {"a.b": ONE, "a": {"b": ONE}}}, tmp_path / "x.pt")
    text = refusal("migrate", tmp_path / "x.pt", tmp_path / "new")
    assert "two different entries flatten to the name 'dotted.a.b'" in text
    assert "give one of the keys that make it another name without a dot, and save it again" in text


def test_a_file_that_the_index_calls_by_another_way_to_it_is_no_stray(tmp_path: Path) -> None:
    dcp.save({"w": ONE}, checkpoint_id=tmp_path / "d", no_dist=True)
    metadata = pickle.loads((tmp_path / "d/.metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"./{place.relative_path}"
    (tmp_path / "d/.metadata").write_bytes(pickle.dumps(metadata))
    assert verify(tmp_path / "d").findings == []
    (tmp_path / "d/__9_0.distcp").write_bytes(b"x")
    assert [finding.code for finding in verify(tmp_path / "d").findings if finding.code == "stray-file"] == ["stray-file"]
