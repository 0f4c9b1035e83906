"""Faults in entries that a copy leaves out do not stop it, and an option without effect is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from labkit.checkpoint import Reader, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.convert.rename import Rule
from labkit.checkpoint.errors import CheckpointError, FQNMismatchError, RankDivergenceError

ONE = torch.ones(2, 2)


def stages(root: Path, *, alike: bool) -> dict[str, torch.Tensor]:
    """Files of two pipeline stages, each with an optimizer of its own; ``alike``: of parameters with the same shapes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3 if alike else 4), nn.LayerNorm(3 if alike else 4))
    weights = model.state_dict()
    root.mkdir()
    for rank, layers in enumerate((("0",), ("1",) if alike else ("2", "1"))):
        mine = {name: value for name, value in weights.items() if name.split(".")[0] in layers}
        parameters = [parameter for name, parameter in model.named_parameters() if name in mine]
        optimizer = torch.optim.AdamW(parameters if alike else parameters[::-1])
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        mine = {name: weights[name] for name in mine}
        torch.save({"model": mine, "optimizer": optimizer.state_dict(), "epoch": 4}, root / f"ckpt_rank{rank}.pt")
    return {name: value for name, value in weights.items() if not alike or not name.startswith("2")}


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("options", [{"drop": ["optimizer.*"]}, {"only": ["model"]}])
def test_stages_of_a_pipeline_become_one_model_where_their_optimizers_are_left_out(
    tmp_path: Path, alike: bool, options: dict[str, Any]
) -> None:
    weights = stages(tmp_path / "pp", alike=alike)
    result = migrate(tmp_path / "pp/ckpt_rank{rank}.pt", tmp_path / "new", **options)
    assert not any("first rank's" in note for note in result.notes)
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert set(reader.checkpoint.tensors) == {f"model.{name}" for name in weights}
        for name, value in weights.items():
            assert torch.equal(reader.tensor(f"model.{name}"), value)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("copies", ["refuse", "first"])
def test_optimizers_of_stages_are_never_taken_for_copies_of_one(tmp_path: Path, alike: bool, copies: Any) -> None:
    stages(tmp_path / "pp", alike=alike)
    with pytest.raises(RankDivergenceError, match=r"optimizer\.state\.0\.exp_avg") as caught:
        migrate(tmp_path / "pp/ckpt_rank{rank}.pt", tmp_path / "new", copies=copies)
    assert "other parameters of the model" in str(caught.value)
    assert "--drop 'optimizer.*'" in str(caught.value)
    assert "copies first" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_entries_of_other_forms_in_rank_files_are_told_and_never_read_from_one(tmp_path: Path) -> None:
    stages(tmp_path / "pp", alike=False)
    checkpoint = open_checkpoint(tmp_path / "pp/ckpt_rank{rank}.pt")
    assert "optimizer.state.1.exp_avg is 3x3 float32 in ckpt_rank0.pt, and 4 float32 in ckpt_rank1.pt" in " ".join(checkpoint.notes)
    assert "unreadable" in {finding.code for finding in verify(checkpoint.path).findings if finding.severity == "error"}
    with pytest.raises(RankDivergenceError, match=r"3x3 float32 in ckpt_rank0\.pt"), Reader(checkpoint) as reader:
        reader.tensor("optimizer.state.1.exp_avg")
    with pytest.raises(CheckpointError):
        reshard(tmp_path / "pp/ckpt_rank{rank}.pt", tmp_path / "new", 2)
    assert not (tmp_path / "new").exists()


def test_copies_that_differ_stop_nothing_where_they_are_left_out(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"model": {"w": ONE}, "ema": {"w": ONE * rank}, "rng": {"cpu": torch.tensor([rank])}}
        torch.save(state, tmp_path / f"rank{rank}.pt")
    pattern = tmp_path / "rank{rank}.pt"
    with pytest.raises(RankDivergenceError, match=r"ema\.w"):
        migrate(pattern, tmp_path / "new")
    for index, options in enumerate(({"only": ["model"]}, {"drop": ["ema.*", "rng.*"]}, {"drop": ["ema.w", "rng.cpu"]})):
        migrate(pattern, tmp_path / f"new{index}", **options)  # type: ignore[arg-type]
        assert set(open_checkpoint(tmp_path / f"new{index}").tensors) == {"model.w"}
    migrate(pattern, tmp_path / "one", drop=["ema.*", "rng.rank_1.*"])
    assert set(open_checkpoint(tmp_path / "one").tensors) == {"model.w", "rng.rank_0.cpu"}


def test_what_a_migration_keys_by_rank_is_compared_rank_by_rank_with_the_files_of_the_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"model": {"w": ONE}, "rng": {"cpu": torch.tensor([rank])}}, tmp_path / f"rank{rank}.pt")
    pattern, new = tmp_path / "rank{rank}.pt", tmp_path / "new"
    migrate(pattern, new)
    for left, right in ((new, pattern), (pattern, new)):
        report = verify(left, against=right)
        assert report.ok
        assert report.checked["compared tensors"] == 3
    torch.save({"model": {"w": ONE}, "rng": {"cpu": torch.tensor([7])}}, tmp_path / "rank1.pt")
    for left, right in ((new, pattern), (pattern, new)):
        report = verify(left, against=right)
        assert [(one.code, one.where) for one in report.findings if one.severity == "error"] == [("other-bits", "rng.rank_1.cpu")]


def one_file(folder: Path) -> Path:
    torch.save({"model": {"w": ONE}, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3}, folder / "x.pt")
    return folder / "x.pt"


def test_a_drop_or_only_that_matches_nothing_is_refused_with_what_may_be_meant(tmp_path: Path) -> None:
    file = one_file(tmp_path)
    for options, words in (
        ({"drop": ["optimiser.*"]}, r"'optimiser\.\*' matches nothing \(did you mean optimizer\.\*\?\)"),
        ({"drop": ["epoch", "epok"]}, r"'epok' matches nothing \(did you mean epoch\?\)"),
        ({"only": ["mod"]}, r"mod \(did you mean model\?\)"),
    ):
        with pytest.raises(FQNMismatchError, match=words):
            migrate(file, tmp_path / "new.pt", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "new.pt").exists()
    migrate(file, tmp_path / "new.pt", only=["model"], drop=["epoch"])
    assert set(open_checkpoint(tmp_path / "new.pt").tensors) == {"model.w"}


def test_a_drop_of_what_only_the_model_has_is_no_slip(tmp_path: Path) -> None:
    torch.save({"model": {"weight": ONE}}, tmp_path / "x.pt")
    migrate(tmp_path / "x.pt", tmp_path / "new", model=nn.Linear(2, 2), drop=["*bias"])
    assert set(open_checkpoint(tmp_path / "new").tensors) == {"model.weight"}


def test_what_a_rename_rule_without_a_right_side_leaves_out_is_named(tmp_path: Path) -> None:
    moments = {"state": {"w": {"exp_avg": ONE}, "v": {"exp_avg": ONE}}, "param_groups": [{"lr": 0.1, "params": ["w", "v"]}]}
    torch.save({"model": {"w": ONE, "v": ONE * 2}, "optim": moments}, tmp_path / "x.pt")
    result = migrate(tmp_path / "x.pt", tmp_path / "new", rules=[Rule("v", "")])
    assert result.notes == ("left out with their optimizer state, since a rename rule has an empty right side: v",)
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert set(reader.checkpoint.tensors) == {"model.w", "optim.state.w.exp_avg"}
        assert reader.value("optim.param_groups.0.params") == ["w"]


def test_an_order_for_state_that_has_names_is_refused(tmp_path: Path) -> None:
    moments = {"state": {"w": {"exp_avg": ONE * 2}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    torch.save({"model": {"w": ONE}, "optimizer": moments}, tmp_path / "x.pt")
    torch.save({"model": {"w": ONE}}, tmp_path / "y.pt")
    for name, words in (("x.pt", "its optimizer state has names"), ("y.pt", "it has no optimizer state")):
        with pytest.raises(FQNMismatchError, match=rf"{words}.*\n?.*--order"):
            migrate(tmp_path / name, tmp_path / "new", order=["w"])
    assert not (tmp_path / "new").exists()


def test_parts_of_names_that_fsdp1_and_compile_put_there_are_told_when_they_go(tmp_path: Path) -> None:
    wrapped = {"_fsdp_wrapped_module.0._orig_mod.weight": ONE, "_fsdp_wrapped_module.1.weight": ONE * 2, "scale": ONE[0]}
    torch.save({"model": wrapped}, tmp_path / "x.pt")
    result = migrate(tmp_path / "x.pt", tmp_path / "new")
    assert set(open_checkpoint(tmp_path / "new").tensors) == {"model.0.weight", "model.1.weight", "model.scale"}
    assert result.notes == (
        "model: parts that wrappers put into names are left out: _fsdp_wrapped_module (2 names), _orig_mod (1 name)",
    )
