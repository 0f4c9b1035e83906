"""Recognition of checkpoints: never by a word in a name, by the order of text or by other files beside them."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.swa_utils import AveragedModel

from labkit.checkpoint import Reader, migrate, open_checkpoint, save, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import (
    AmbiguousCheckpointError,
    CheckpointError,
    FQNMismatchError,
    IncompleteCheckpointError,
    RankDivergenceError,
)
from labkit.checkpoint.pickles.values import digest

ONE = torch.ones(2, 2)


def folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def piece(rank: int) -> dict[str, Any]:
    """The state that rank ``rank`` of 12 saves: equal weights, and its two elements of a moment."""
    moment = torch.tensor([2.0 * rank, 2.0 * rank + 1])
    groups = [{"lr": 0.1, "params": [0]}]
    return {"model": {"weight": torch.zeros(12, 2)}, "optimizer": {"state": {0: {"exp_avg": moment}}, "param_groups": groups}}


def test_a_rank_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    for rank in range(12):
        torch.save(piece(rank), folder(tmp_path / "A") / f"ckpt_{rank}.pt")

    def build() -> torch.nn.Module:
        return torch.nn.Linear(2, 12, bias=False)

    migrate(tmp_path / "A", tmp_path / "new", model=build)
    assert verify(tmp_path / "new").ok
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert torch.equal(reader.tensor("optimizer.state.weight.exp_avg"), torch.arange(24.0).reshape(12, 2))


def test_b_ranks_keep_their_numbers_and_missing_ones_are_an_error(tmp_path: Path) -> None:
    for rank in (2, 3):
        state = {"model": {"w": ONE}, "dataloader": {"perm": torch.tensor([rank]), "pos": rank}}
        torch.save(state, folder(tmp_path / "B") / f"ckpt_rank_{rank}.pt")
    pattern = tmp_path / "B/ckpt_rank_{rank}.pt"
    with pytest.raises(AmbiguousCheckpointError, match=r"dataloader\.perm differs") as caught:
        open_checkpoint(tmp_path / "B")
    assert str(pattern) in caught.value.readings
    checkpoint = open_checkpoint(pattern)
    assert checkpoint.ranks == {"ckpt_rank_2.pt": 2, "ckpt_rank_3.pt": 3}
    assert checkpoint.missing_ranks == (0, 1)
    assert checkpoint.values["dataloader.pos"].replicas == {2: 2, 3: 3}
    (finding,) = [finding for finding in verify(pattern).findings if finding.severity == "error"]
    assert finding.code == "missing-rank"
    assert "ranks 2-3, but none of ranks 0-1" in finding.what


def test_c_checkpoints_of_several_epochs_are_listed_and_not_read_as_ranks(tmp_path: Path) -> None:
    for epoch in range(3):
        torch.save({"model": {"w": ONE * (epoch + 1)}}, folder(tmp_path / "C") / f"epoch_{epoch}.pt")
    with pytest.raises(AmbiguousCheckpointError, match=r"model\.w differs between epoch_0\.pt and epoch_1\.pt") as caught:
        open_checkpoint(tmp_path / "C")
    assert str(tmp_path / "C/epoch_2.pt") in caught.value.readings
    result = CliRunner().invoke(command, ["migrate", str(tmp_path / "C"), str(tmp_path / "new")])
    assert (result.exit_code, result.exception) == (1, result.exception)
    assert "epoch_1.pt" in result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "names", [("last.ckpt", "best.ckpt"), ("model_1000.pt", "model_final.pt"), ("a.safetensors", "ema.safetensors")]
)
def test_c_checkpoints_of_different_names_are_listed(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        save_file({"w": ONE}, tmp_path / name) if name.endswith("tensors") else torch.save({"w": ONE}, tmp_path / name)
    with pytest.raises(AmbiguousCheckpointError, match="2 checkpoints") as caught:
        open_checkpoint(tmp_path)
    assert all(any(name in reading for reading in caught.value.readings) for name in names)


def accelerate(root: Path) -> Path:
    """A checkpoint of several parts, as trainers lay it out: DCP folders of model and optimizer, files beside them."""
    dcp.save({"model": {"w": ONE}}, checkpoint_id=root / "pytorch_model_fsdp_0", no_dist=True)
    moments = {"state": {"w": {"exp_avg": ONE * 2}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    dcp.save({"optimizer": moments}, checkpoint_id=root / "optimizer_0", no_dist=True)
    torch.save({"last_epoch": 3}, root / "scheduler.pt")
    return root


def test_d_a_folder_with_parts_in_it_is_refused_with_their_names(tmp_path: Path) -> None:
    root = accelerate(tmp_path / "checkpoint-3")
    with pytest.raises(AmbiguousCheckpointError, match="3 checkpoints") as caught:
        migrate(root, tmp_path / "new")
    assert [reading.split("  ")[0] for reading in caught.value.readings] == ["scheduler.pt", "optimizer_0", "pytorch_model_fsdp_0"]
    (finding,) = verify(root).findings
    assert "pytorch_model_fsdp_0" in finding.what


def test_d_parts_that_are_named_become_one_checkpoint_and_what_is_not_named_is_told(tmp_path: Path) -> None:
    root = accelerate(tmp_path / "checkpoint-3")
    arguments = ["migrate", str(root), str(tmp_path / "new"), "--part", "=pytorch_model_fsdp_0", "--part", "=optimizer_0"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert "left out, since no --part names it: scheduler.pt" in result.output
    target = {"model": {"w": torch.zeros(2, 2)}, "optimizer": {"state": {"w": {"exp_avg": torch.zeros(2, 2)}}}}
    dcp.load(target, checkpoint_id=tmp_path / "new", no_dist=True)
    assert torch.equal(target["model"]["w"], ONE)
    assert torch.equal(target["optimizer"]["state"]["w"]["exp_avg"], ONE * 2)
    whole = CliRunner().invoke(command, [*arguments[:2], str(tmp_path / "all"), *arguments[3:], "--part", "sched=scheduler.pt"])
    assert "left out" not in whole.output
    with Reader(open_checkpoint(tmp_path / "all")) as reader:
        assert reader.value("sched.last_epoch") == 3


def test_d_two_parts_with_one_name_are_refused(tmp_path: Path) -> None:
    root = accelerate(tmp_path / "checkpoint-3")
    with pytest.raises(CheckpointError, match=r"two parts have an entry 'model\.w'"):
        migrate(root, tmp_path / "new", parts=[("", "pytorch_model_fsdp_0"), ("", "pytorch_model_fsdp_0/.metadata")])


def test_d_a_file_beside_a_dcp_checkpoint_is_never_dropped_in_silence(tmp_path: Path) -> None:
    dcp.save({"state_dict": {"w": ONE}}, checkpoint_id=tmp_path / "last.ckpt", no_dist=True)
    torch.save({"epoch": 3}, tmp_path / "last.ckpt/meta.pt")
    with pytest.raises(AmbiguousCheckpointError, match=r"\.metadata  \(DCP\)"):
        open_checkpoint(tmp_path / "last.ckpt")
    assert open_checkpoint(tmp_path / "last.ckpt/.metadata").kind == "dcp"
    migrate(tmp_path / "last.ckpt", tmp_path / "new", parts=[("", ".metadata"), ("meta", "meta.pt")])
    assert set(open_checkpoint(tmp_path / "new").values) == {"meta.epoch"}


def test_d2_training_state_is_not_left_out_of_an_export_without_a_word(tmp_path: Path) -> None:
    root = folder(tmp_path / "D2")
    save_file({"w": ONE}, root / "model.safetensors")
    torch.save({"state": {0: {"exp_avg": ONE}}, "param_groups": [{"params": [0]}]}, root / "optimizer.pt")
    with pytest.raises(AmbiguousCheckpointError, match=r"optimizer\.pt  \(torch\.save\)"):
        migrate(root, tmp_path / "new")
    result = migrate(root, tmp_path / "new", parts=[("model", "model.safetensors"), ("optim", "optimizer.pt")], order=["w"])
    assert result.num_tensors == 2
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert torch.equal(reader.tensor("optim.state.w.exp_avg"), ONE)


@pytest.mark.parametrize(
    "word", ["scaler", "sampler", "random", "epoch", "rng", "sched", "dataloader", "optimizer", "state", "module"]
)
def test_e_a_word_in_a_name_never_takes_a_tensor_out_of_the_model(tmp_path: Path, word: str) -> None:
    torch.save({f"{word}.weight": ONE, "backbone.weight": ONE * 2, f"{word}.sum": ONE * 3}, tmp_path / "x.pt")
    migrate(tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert set(load_file(tmp_path / "x.safetensors")) == {f"{word}.weight", "backbone.weight", f"{word}.sum"}


def test_e_integers_and_counters_in_a_dict_of_their_own_are_no_model(tmp_path: Path) -> None:
    state = {
        "model": {"w": ONE},
        "rng": {"cpu": torch.zeros(9, dtype=torch.uint8)},
        "scaler": {"scale": torch.tensor(2.0)},
        "epoch": 3,
    }
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(
        CheckpointError, match=r"rng \(1 tensor\), scaler \(1 tensor\), epoch \(1 value\)\. Say what to keep: --only 'model'"
    ):
        migrate(tmp_path / "x.pt", tmp_path / "x.safetensors")
    result = migrate(tmp_path / "x.pt", tmp_path / "x.safetensors", only=["model"])
    assert "rng (1 tensor)" in result.notes[-1]
    assert set(load_file(tmp_path / "x.safetensors")) == {"w"}


def test_e_of_two_models_in_one_file_one_has_to_be_chosen(tmp_path: Path) -> None:
    torch.save({"model": {"w": ONE}, "ema": {"w": ONE * 2}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"--only 'model' or --only 'ema'\."):
        migrate(tmp_path / "x.pt", tmp_path / "x.safetensors")
    migrate(tmp_path / "x.pt", tmp_path / "x.safetensors", only=["ema"])
    assert torch.equal(load_file(tmp_path / "x.safetensors")["w"], ONE * 2)
    with pytest.raises(FQNMismatchError, match="Its top-level keys are 'ema', 'model'"):
        migrate(tmp_path / "x.pt", tmp_path / "y.safetensors", only=["emma"])


def test_f_with_the_model_at_hand_its_names_decide_about_module(tmp_path: Path) -> None:
    averaged = AveragedModel(torch.nn.Linear(2, 2))
    torch.save(averaged.state_dict(), tmp_path / "F.pt")
    for model in (None, lambda: AveragedModel(torch.nn.Linear(2, 2))):
        name = f"new-{model is None}"
        migrate(tmp_path / "F.pt", tmp_path / name, model=model)
        assert set(open_checkpoint(tmp_path / name).tensors) == {"n_averaged", "module.weight", "module.bias"}


def test_f_the_prefix_of_ddp_goes_and_is_told(tmp_path: Path) -> None:
    torch.save({"model": {"module.weight": ONE, "module.bias": ONE[0]}}, tmp_path / "x.pt")
    result = migrate(tmp_path / "x.pt", tmp_path / "new")
    assert set(open_checkpoint(tmp_path / "new").tensors) == {"model.weight", "model.bias"}
    assert result.notes == ("model: every name begins with module., as DDP's do, which is left out",)
    own = torch.nn.Module()
    own.module = torch.nn.Linear(2, 2)
    migrate(tmp_path / "x.pt", tmp_path / "own", model=own)
    assert set(open_checkpoint(tmp_path / "own").tensors) == {"model.module.weight", "model.module.bias"}


@pytest.mark.parametrize("ranks", [True, False])
def test_f_a_name_with_and_without_module_is_listed_and_the_model_or_the_user_decides(tmp_path: Path, ranks: bool) -> None:
    own = {"weight": ONE, "bias": ONE[0]}
    inside = {f"module.{name}": value for name, value in own.items()}
    for rank, names in enumerate((own, inside) if ranks else ({**own, **inside},)):
        torch.save({"model": names, "step": 3}, folder(tmp_path / "old") / f"rank{rank}.pt")
    source = tmp_path / ("old/rank{rank}.pt" if ranks else "old/rank0.pt")
    with pytest.raises(FQNMismatchError, match=r"model\.weight and model\.module\.weight may be one parameter") as caught:
        migrate(source, tmp_path / "new")
    assert "--drop 'model.module.*'" in str(caught.value)
    (finding,) = verify(source).findings
    assert (finding.code, finding.severity) == ("wrapped-name", "warning")
    assert "2 names are there with and without a part module: weight and module.weight" in finding.what
    migrate(source, tmp_path / "left", drop=["model.module.*"])
    assert set(open_checkpoint(tmp_path / "left").tensors) == {"model.weight", "model.bias"}
    with pytest.raises(CheckpointError, match=r"unexpected in the checkpoint: module\.weight"):
        migrate(source, tmp_path / "other", model=lambda: torch.nn.Linear(2, 2))
    both = torch.nn.Linear(2, 2)
    both.module = torch.nn.Linear(2, 2)  # type: ignore[assignment]
    migrate(source, tmp_path / "both", model=both)
    assert set(open_checkpoint(tmp_path / "both").tensors) == {f"model.{name}" for name in (*own, *inside)}


def test_f_names_with_and_without_module_of_other_shapes_are_two_parameters(tmp_path: Path) -> None:
    torch.save({"bias": ONE[0], "module.bias": ONE}, tmp_path / "x.pt")
    migrate(tmp_path / "x.pt", tmp_path / "new")
    assert set(open_checkpoint(tmp_path / "new").tensors) == {"bias", "module.bias"}


def test_f_a_save_takes_module_out_for_ddp_by_its_type_and_leaves_a_submodule_of_that_name(tmp_path: Path) -> None:
    save(tmp_path / "store", {"model": AveragedModel(torch.nn.Linear(2, 2))}, 1)
    assert set(open_checkpoint(tmp_path / "store").tensors) == {"model.n_averaged", "model.module.weight", "model.module.bias"}
    save(tmp_path / "ddp", {"model": torch.nn.DataParallel(torch.nn.Linear(2, 2))}, 1)
    assert set(open_checkpoint(tmp_path / "ddp").tensors) == {"model.weight", "model.bias"}


def test_j_a_file_that_the_index_does_not_name_is_an_error(tmp_path: Path) -> None:
    root = folder(tmp_path / "files")
    save_file({"a": ONE}, root / "m-1-of-2.safetensors")
    save_file({"b": ONE}, root / "m-2-of-2.safetensors")
    index = root / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1-of-2.safetensors"}}))
    assert not verify(root).ok
    with pytest.raises(AmbiguousCheckpointError, match=r"m-2-of-2\.safetensors"):
        migrate(root, tmp_path / "new.pt")
    index.write_text(json.dumps({"weight_map": {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}}))
    assert set(open_checkpoint(root).tensors) == {"a", "b"}


def test_copies_of_one_tensor_that_differ_are_an_error_with_both_files(tmp_path: Path) -> None:
    root = folder(tmp_path / "files")
    for rank in range(2):
        torch.save({"scaler.weight": ONE * rank, "w": ONE}, root / f"rank{rank}.pt")
    with pytest.raises(AmbiguousCheckpointError, match=r"scaler\.weight differs between rank0\.pt and rank1\.pt"):
        migrate(root, tmp_path / "new")
    with pytest.raises(RankDivergenceError, match=r"scaler\.weight: rank0\.pt and rank1\.pt hold different values"):
        migrate(root / "rank{rank}.pt", tmp_path / "new")
    result = migrate(root / "rank{rank}.pt", tmp_path / "new", copies="first")
    assert result.num_tensors == 2


def test_random_states_alone_do_not_say_whether_they_are_ranks_or_epochs(tmp_path: Path) -> None:
    for number in range(2):
        torch.save({"rng": torch.tensor([number], dtype=torch.uint8)}, tmp_path / f"rng_state_{number}.pth")
    with pytest.raises(AmbiguousCheckpointError, match=r"rng_state_\{rank\}\.pth"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path / "rng_state_{rank}.pth").ranks == {"rng_state_0.pth": 0, "rng_state_1.pth": 1}
    migrate(tmp_path / "rng_state_{rank}.pth", tmp_path / "new")
    assert set(open_checkpoint(tmp_path / "new").tensors) == {"rng.rank_0", "rng.rank_1"}


def test_a_pattern_says_where_the_rank_stands(tmp_path: Path) -> None:
    for step in (10, 20):
        for rank in range(3):
            state = {"model": {"w": ONE * step}, "who": {"rank": rank, "step": step}}
            torch.save(state, folder(tmp_path / f"step{step}/node{rank // 2}") / f"gpu{rank + 1}.pt")
    found = open_checkpoint(tmp_path / "step20/node*/gpu{rank+1}.pt")
    assert found.ranks == {"node0/gpu1.pt": 0, "node0/gpu2.pt": 1, "node1/gpu3.pt": 2}
    assert found.values["who.rank"].replicas == {0: 0, 1: 1, 2: 2}
    with pytest.raises(CheckpointError, match="have rank 0"):
        open_checkpoint(tmp_path / "step*/node*/gpu{rank+1}.pt")
    with pytest.raises(CheckpointError, match="no file matches"):
        open_checkpoint(tmp_path / "step30/{rank}.pt")


def test_parts_of_one_state_need_no_ranks(tmp_path: Path) -> None:
    torch.save({"a.weight": ONE, "version": 1}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b.weight": ONE, "version": 1}, tmp_path / "pytorch_model-00002-of-00002.bin")
    checkpoint = open_checkpoint(tmp_path)
    assert (set(checkpoint.tensors), checkpoint.ranks) == ({"a.weight", "b.weight"}, {})


@pytest.mark.parametrize("there", [[1, 3], [1], [2, 3]])
def test_j_a_numbered_file_that_is_missing_is_named(tmp_path: Path, there: list[int]) -> None:
    for number in there:
        save_file({f"w{number}": ONE}, tmp_path / f"model-{number:05d}-of-00003.safetensors")
    missing = next(number for number in (1, 2, 3) if number not in there)
    with pytest.raises(IncompleteCheckpointError, match=f"model-{missing:05d}-of-00003.safetensors"):
        open_checkpoint(tmp_path)


# -- found by a user who knew only the help texts ---------------------------------------------------------------------


def named_backwards(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer, Path]:
    """A file whose optimizer was made of named parameters in reverse, all of one shape."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1])
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, folder / "x.pt")
    return model, optimizer, folder / "x.pt"


@pytest.mark.parametrize("with_model", [True, False])
def test_names_that_the_optimizer_has_noted_decide_over_the_models_order(tmp_path: Path, with_model: bool) -> None:
    model, optimizer, file = named_backwards(tmp_path)
    migrate(file, tmp_path / "new", model=model if with_model else None)
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        for name, parameter in model.named_parameters():
            assert torch.equal(reader.tensor(f"optim.state.{name}.exp_avg"), optimizer.state[parameter]["exp_avg"])
        assert reader.value("optim.param_groups.0.params") == ["1.weight", "0.weight"]
    with pytest.raises(FQNMismatchError, match="the optimizer itself has recorded"):
        migrate(file, tmp_path / "other", order=["0.weight", "1.weight"])


@pytest.mark.parametrize(
    "state",
    [
        {"m": {30: 1, 60: 1}},
        {"m": {1: 3, 2: 4}, "deep": {"workers": {0: {"pos": 1}, 1: {"pos": 2}}}},
        {"i": [torch.ones(2), torch.zeros(2)]},
        {"ema": {"decay": 0.9, "shadow_params": [torch.ones(2), None]}},
        {0: torch.ones(2), "a": [{"b": torch.ones(1)}]},
    ],
)
def test_dicts_with_int_keys_stay_dicts_and_lists_stay_lists(tmp_path: Path, state: dict[Any, Any]) -> None:
    torch.save(state | {"w": torch.ones(2, 2)}, tmp_path / "x.pt")
    migrate(tmp_path / "x.pt", tmp_path / "y.pt")
    assert torch.load(tmp_path / "y.pt", weights_only=True).keys() == (state | {"w": 0}).keys()
    before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("x.pt", "y.pt"))
    assert digest(after) == digest(before)
    migrate(tmp_path / "x.pt", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "z.pt")  # as torch's own save of the same state: int keys become text
    assert set(torch.load(tmp_path / "z.pt", weights_only=True)) == {str(key) for key in (*state, "w")}


def test_parts_of_a_tensor_in_rank_files_are_no_copies(tmp_path: Path) -> None:
    for rank, rows in enumerate((4, 3)):
        torch.save({"model": {"w": torch.ones(rows, 2), "scale": ONE}}, folder(tmp_path / "f") / f"rank_{rank}.pt")
    for copies in ("refuse", "first"):
        with pytest.raises(RankDivergenceError, match=r"w is 4x2 in rank_0\.pt and 3x2 in rank_1\.pt"):
            migrate(tmp_path / "f/rank_{rank}.pt", tmp_path / "new", copies=copies)  # type: ignore[arg-type]


def test_a_part_that_a_pattern_names_is_not_called_left_out(tmp_path: Path) -> None:
    save_file({"w": ONE}, folder(tmp_path / "c") / "model.safetensors")
    for rank in range(2):
        torch.save({"cpu": torch.tensor([rank], dtype=torch.uint8)}, tmp_path / f"c/rng_state_{rank}.pth")
    parts = [("model", "model.safetensors"), ("rng", "rng_state_{rank}.pth")]
    result = migrate(tmp_path / "c", tmp_path / "new", parts=parts)
    assert not any("left out" in note for note in result.notes)
    with pytest.raises(AmbiguousCheckpointError, match=r"in their names: 'rng_state_\{rank\}\.pth'"):
        migrate(tmp_path / "c", tmp_path / "other", parts=[parts[0], ("rng", "rng_state_*.pth")])


def test_c_equal_weights_with_another_epoch_or_at_far_numbers_are_no_ranks(tmp_path: Path) -> None:
    for epoch in range(2):
        torch.save({"model": {"w": ONE}, "epoch": epoch + 5}, folder(tmp_path / "e") / f"epoch_{epoch}.pt")
        torch.save({"model": {"w": ONE}}, folder(tmp_path / "s") / f"step_{100 + 100 * epoch}.pt")
        torch.save({"model": {"w": ONE}, "rank": epoch}, folder(tmp_path / "r") / f"file_{epoch}.pt")
    with pytest.raises(AmbiguousCheckpointError, match=r"epoch differs"):
        open_checkpoint(tmp_path / "e")
    with pytest.raises(AmbiguousCheckpointError, match=r"up to 200 would be missing"):
        open_checkpoint(tmp_path / "s")
    with pytest.raises(AmbiguousCheckpointError, match=r"rank differs"):
        open_checkpoint(tmp_path / "r")
    assert open_checkpoint(tmp_path / "r/file_{rank}.pt").ranks == {"file_0.pt": 0, "file_1.pt": 1}


def moments(count: int, scale: float = 1) -> dict[str, Any]:
    return {"state": {0: {"exp_avg": ONE * scale, "step": torch.tensor(float(count))}}, "param_groups": [{"params": [0]}]}


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({"epoch": 0}, {"epoch": 1}, "epoch differs"),
        ({"epoch": 0}, {"epoch": 1, "ema": {"w": ONE * 2}}, r"only ckpt_1\.pt holds ema"),
        ({"epoch": 0}, {"epoch": 1, "best": 0.5}, r"only ckpt_1\.pt holds best"),
        ({"epoch": 0, "optimizer": moments(3)}, {"epoch": 1}, r"only ckpt_0\.pt holds optimizer"),
        ({"global_step": torch.tensor(100)}, {"global_step": torch.tensor(200)}, "global_step differs"),
        ({"loop": {"seen": [1, 2]}}, {"loop": {"seen": [1, 3]}}, r"loop\.seen differs"),
        ({"ema": {"w": ONE}}, {"ema": {"w": ONE * 2}}, r"ema\.w differs"),
        ({"optimizer": moments(3)}, {"optimizer": moments(3, 2)}, r"optimizer\.state\.0\.exp_avg differs"),
        ({"args": Namespace(epoch=0)}, {"args": Namespace(epoch=1)}, r"args is not plain data"),
        ({"model2": {"a": ONE}}, {"model2": {"a": ONE, "b": ONE}}, r"only ckpt_1\.pt holds model2\.b"),
    ],
)
def test_epochs_with_frozen_weights_are_no_ranks_and_both_readings_are_listed_and_work(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], why: str
) -> None:
    root = folder(tmp_path / "old")
    for number, more in enumerate((first, second)):
        torch.save({"model": {"w": ONE}, **more}, root / f"ckpt_{number}.pt")
    (finding,) = verify(root).findings
    assert finding.code == "unreadable"
    with pytest.raises(AmbiguousCheckpointError, match=why) as caught:
        migrate(root, tmp_path / "new")
    assert caught.value.readings == (*(str(root / f"ckpt_{number}.pt") for number in range(2)), str(root / "ckpt_{rank}.pt"))
    for reading in caught.value.readings:
        assert open_checkpoint(reading).tensors.keys() >= {"model.w"}


def test_the_pattern_is_the_users_word_that_a_count_is_each_ranks_own(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"model": {"w": ONE}, "rank": rank}, folder(tmp_path / "old") / f"f{rank}.pt")
    result = migrate(tmp_path / "old/f{rank}.pt", tmp_path / "new")
    assert "rank differs between the rank files and is keyed by rank" in result.notes
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert [reader.value(f"rank.rank_{rank}") for rank in range(2)] == [0, 1]


def random_states(seed: int) -> list[Any]:
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    return [
        {"cpu": torch.Generator().manual_seed(seed).get_state(), "cuda": [torch.full((16,), seed, dtype=torch.uint8)]},
        {"py": python.getstate(), "list": list(python.getstate()), "np": numpy.get_state()},
        {"new": np.random.default_rng(seed).bit_generator.state, "dict": numpy.get_state(legacy=False)},
        {f"rank_{seed}": {"position": seed}},
    ]


@pytest.mark.parametrize("kind", range(4))
def test_files_that_differ_in_the_states_of_generators_alone_are_ranks_whatever_those_are_called(tmp_path: Path, kind: int) -> None:
    for rank in range(2):
        torch.save({"model": {"w": ONE}, "epoch": 3, "abc": random_states(rank)[kind]}, folder(tmp_path / "old") / f"e_{rank}.pt")
    assert open_checkpoint(tmp_path / "old").ranks == {"e_0.pt": 0, "e_1.pt": 1}


@pytest.mark.parametrize(("rows", "same"), [((3, 3), False), ((3, 1), True), ((2, 2), True)])
def test_numbered_moments_that_differ_are_shares_only_where_their_length_says_so(
    tmp_path: Path, rows: tuple[int, int], same: bool
) -> None:
    for rank, length in enumerate(rows):
        state = {"state": {0: {"exp_avg": torch.full((length,), float(rank))}}, "param_groups": [{"params": [0]}]}
        torch.save({"model": {"b": torch.ones(3)}, "optim": state}, folder(tmp_path / "old") / f"s{rank}.pt")
    if same:
        assert open_checkpoint(tmp_path / "old").ranks == {"s0.pt": 0, "s1.pt": 1}
    else:
        with pytest.raises(AmbiguousCheckpointError, match=r"optim\.state\.0\.exp_avg differs"):
            open_checkpoint(tmp_path / "old")


# -- names of every kind over files that say who they are -------------------------------------------------------------

WORDS = st.sampled_from(["rank", "step", "epoch", "node", "shard", "ckpt", "model", "gpu", "part"])
JOINTS = st.sampled_from(["_", "-", "", "=", "."])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], bool]:
    """Names with the rank and the step of each file, and whether all ranks of one step are present."""
    ranks = draw(st.lists(st.integers(0, 13), min_size=1, max_size=5, unique=True))
    steps = draw(st.lists(st.integers(0, 120), min_size=1, max_size=3, unique=True))
    order = draw(st.permutations(["rank", "step", "word"]))
    shown = draw(st.sets(st.sampled_from(["rank", "step"]), min_size=1))
    width, base, words = draw(st.integers(1, 4)), draw(st.integers(0, 1)), {part: draw(WORDS) for part in order}
    joint = draw(JOINTS)
    files: dict[str, tuple[str, int, int]] = {}
    for rank in ranks:
        for step in steps:
            numbers = {"rank": rank + base, "step": step}
            texts = [words[part] + (joint + f"{numbers[part]:0{width}}" if part in shown else "") for part in order]
            name = "_".join(texts) + ".pt"
            files.setdefault(name, (name, rank, step))
    return list(files.values()), base == 0


@settings(max_examples=120, deadline=None)
@given(layout=layouts())
def test_names_of_any_kind_give_the_right_ranks_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, layout: tuple[list[tuple[str, int, int]], bool]
) -> None:
    files, from_zero = layout
    root = tmp_path_factory.mktemp("names")
    for name, rank, step in files:
        own = torch.tensor([rank] * 16, dtype=torch.uint8)  # of a GPU's random state
        torch.save({"model": {"w": torch.full((2, 2), float(step))}, "step": step, "rng": own}, root / name)
    try:
        checkpoint = open_checkpoint(root)
    except AmbiguousCheckpointError:
        return
    truth = {name: (rank, step) for name, rank, step in files}
    assert len({truth[name][1] for name in checkpoint.files}) == 1
    for name, rank in checkpoint.ranks.items():
        assert rank == truth[name][0] + (not from_zero)
    if checkpoint.ranks and not from_zero:
        assert checkpoint.missing_ranks  # the names count from 1, so rank 0 is missing: an error with advice
