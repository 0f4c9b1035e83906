"""Tied tensors: one tensor under two names stays one, through every format and back."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from torch import nn

from labkit.checkpoint import Checkpoint, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.errors import CheckpointMismatchError
from labkit.checkpoint.views.describe import ties

TIE = [["model.embed.weight", "model.head.weight"]]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(800, 8), nn.Linear(8, 8), nn.Linear(8, 800, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def file(model: Tied, tmp_path: Path) -> Path:
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def names(checkpoint: Checkpoint) -> list[list[str]]:
    """Its ties, without the nesting that safetensors do not have."""
    return [[name.removeprefix("model.") for name in group] for group in ties(checkpoint)]


def test_a_tie_goes_through_dcp_and_back(model: Tied, file: Path, tmp_path: Path) -> None:
    result = migrate(file, tmp_path / "dcp")
    assert result.notes == ("tied, and written once: model.head.weight = model.embed.weight",)
    reshard(tmp_path / "dcp", tmp_path / "four", 4)
    for path in (tmp_path / "dcp", tmp_path / "four"):
        checkpoint = open_checkpoint(path)
        assert ties(checkpoint) == TIE
        assert checkpoint.files["__0_0.distcp"] < 2 * model.embed.weight.nbytes
        assert verify(path, model=Tied).findings == []
        assert verify(path, against=file).findings == []
        read = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(read, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(value, read["model"][name]) for name, value in model.state_dict().items())
        migrate(path, tmp_path / f"{path.name}.pt")
        back = torch.load(tmp_path / f"{path.name}.pt", weights_only=True)["model"]
        assert back["head.weight"].untyped_storage().data_ptr() == back["embed.weight"].untyped_storage().data_ptr()


@pytest.mark.parametrize("target", ["x.safetensors", "folder"])
def test_safetensors_hold_one_name_and_note_the_other(model: Tied, file: Path, tmp_path: Path, target: str) -> None:
    result = migrate(file, tmp_path / target, to="safetensors", shard_bytes=600, only=["model"])
    note = "tied, and held under one name, as transformers expects it: head.weight = embed.weight (noted in the metadata)"
    assert note in result.notes
    checkpoint = open_checkpoint(tmp_path / target)
    assert names(checkpoint) == [["embed.weight", "head.weight"]]
    assert checkpoint.notes == []
    assert verify(tmp_path / target, model=Tied).findings == []
    assert verify(tmp_path / target, against=file).findings == []
    migrate(tmp_path / target, tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["head.weight"].untyped_storage().data_ptr() == back["embed.weight"].untyped_storage().data_ptr()
    if target == "x.safetensors":
        with safe_open(tmp_path / target, "pt") as opened:
            assert "head.weight" not in opened.keys()  # noqa: SIM118 -- it is not a dict
            assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        other = Tied()
        load_model(other, str(tmp_path / target))
        assert torch.equal(other.head.weight, model.head.weight)


def test_a_name_that_the_writer_of_safetensors_left_out_is_no_missing_key(model: Tied, file: Path, tmp_path: Path) -> None:
    save_file({name: value for name, value in model.state_dict().items() if name != "head.weight"}, tmp_path / "y.safetensors")
    assert verify(tmp_path / "y.safetensors", model=Tied).findings == []
    for one, other in ((file, tmp_path / "y.safetensors"), (tmp_path / "y.safetensors", file)):
        assert verify(one, against=other).findings == []


def test_what_torchs_own_dcp_stored_twice_becomes_one_again_where_the_model_ties_it(model: Tied, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert ties(open_checkpoint(tmp_path / "dcp")) == []
    assert verify(tmp_path / "dcp", model=Tied).findings == []
    migrate(tmp_path / "dcp", tmp_path / "x.pt", model=Tied)
    assert ties(open_checkpoint(tmp_path / "x.pt")) == TIE


def test_names_that_the_model_ties_and_that_differ_are_refused_and_found(model: Tied, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["head.weight"][799, 7] += 1
    torch.save({"model": state}, tmp_path / "x.pt")
    (finding,) = verify(tmp_path / "x.pt", model=Tied).findings
    assert (finding.code, finding.where) == ("untied", "head.weight")
    with pytest.raises(CheckpointMismatchError, match=r"head\.weight and embed\.weight are one tensor in the model, and differ"):
        migrate(tmp_path / "x.pt", tmp_path / "out", model=Tied)
    migrate(tmp_path / "x.pt", tmp_path / "out", model=Tied, drop=["model.head.weight"])
    assert ties(open_checkpoint(tmp_path / "out")) == TIE


def test_a_tie_that_the_model_does_not_have_is_told(file: Path, tmp_path: Path) -> None:
    def two() -> nn.Module:
        model = Tied()
        model.head.weight = nn.Parameter(torch.zeros(800, 8))
        return model

    migrate(file, tmp_path / "dcp")
    for path in (file, tmp_path / "dcp"):
        (finding,) = verify(path, model=two).findings
        assert (finding.code, finding.severity, finding.where) == ("tied", "warning", "head.weight")


def test_a_tie_that_cannot_stay_is_told(file: Path, tmp_path: Path) -> None:
    result = migrate(file, tmp_path / "dcp", dtypes={"head.*": torch.bfloat16})
    assert "no longer tied, since they get different dtypes or names: model.head.weight = model.embed.weight" in result.notes
    assert ties(open_checkpoint(tmp_path / "dcp")) == []
    result = reshard(file, tmp_path / "two", {"dp": 2, "tp": 2}, rules=[])
    assert ties(open_checkpoint(tmp_path / "two")) == TIE


def test_a_note_of_safetensors_that_names_no_tensor_is_no_tie(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt", "b": "c", "a": "a"})
    assert list(open_checkpoint(tmp_path / "x.safetensors").tensors) == ["a"]
    assert json.loads(json.dumps(open_checkpoint(tmp_path / "x.safetensors").metadata)) == {"format": "pt", "b": "c", "a": "a"}
