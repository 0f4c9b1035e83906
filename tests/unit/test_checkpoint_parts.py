"""Checkpoints put together from parts: FSDP2 finds their names, and every file that is left out is reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.state_dict import get_state_dict

from labkit.checkpoint import Reader, migrate, open_checkpoint
from labkit.checkpoint.cli import MIGRATE_HELP
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import FQNMismatchError

ONE = torch.ones(2, 2)
README = Path(__file__).parents[2] / "README.md"


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def accelerate(root: Path) -> tuple[Path, torch.nn.Module, torch.optim.Optimizer]:
    """Save as accelerate does under FSDP: DCP folders that hold a dict ``model`` and a dict ``optimizer``."""
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=root / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": moments}, checkpoint_id=root / "optimizer_0", no_dist=True)
    torch.save({"last_epoch": 3}, root / "scheduler.bin")
    return root, model, optimizer


def loaded(new: Path) -> dict[str, object]:
    """The state that ``dcp.load`` loads for a fresh model and optimizer."""
    model = build()
    weights, moments = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    target = {"model": weights, "optimizer": moments}
    dcp.load(target, checkpoint_id=new, no_dist=True)
    return target


@pytest.mark.parametrize("text", [MIGRATE_HELP, README.read_text()], ids=["help", "readme"])
def test_the_documented_parts_of_accelerate_give_names_that_dcp_finds(tmp_path: Path, text: str) -> None:
    root, model, optimizer = accelerate(tmp_path / "checkpoint-3")
    (parts,) = re.findall(r"migrate \S+ \S+ (--part \S*pytorch_model_fsdp_0[^`\n]*)", text)
    result = CliRunner().invoke(command, ["migrate", str(root), str(tmp_path / "new"), *parts.split()])
    assert result.exit_code == 0, result.output
    target = loaded(tmp_path / "new")
    for name, tensor in model.state_dict().items():
        assert torch.equal(target["model"][name], tensor)  # type: ignore[index]
    moments = get_state_dict(model, optimizer)[1]["state"]
    for name in moments:
        assert torch.equal(target["optimizer"]["state"][name]["exp_avg"], moments[name]["exp_avg"])  # type: ignore[index]


def test_a_part_that_holds_its_own_name_and_nothing_else_is_taken_as_it_is_and_told(tmp_path: Path) -> None:
    root, _, _ = accelerate(tmp_path / "c")
    result = migrate(root, tmp_path / "new", parts=[("model", "pytorch_model_fsdp_0"), ("optim", "optimizer_0")])
    assert "the part pytorch_model_fsdp_0 holds model and nothing else" in " ".join(result.notes)
    names = set(open_checkpoint(tmp_path / "new").tensors)
    assert {"model.0.weight", "optim.optimizer.state.0.weight.exp_avg"} <= names


@pytest.mark.parametrize("state", [{"model": {"w": ONE}, "epoch": 3}, {"w": ONE}, {"model": ONE}])
def test_a_part_that_holds_more_or_less_than_its_name_comes_under_it(tmp_path: Path, state: dict[str, object]) -> None:
    torch.save(state, tmp_path / "a.pt")
    migrate(tmp_path, tmp_path.parent / f"{tmp_path.name}-new", parts=[("model", "a.pt")])
    found = open_checkpoint(tmp_path.parent / f"{tmp_path.name}-new")
    assert all(key.startswith("model.") for key in (*found.tensors, *found.values))


def test_a_part_under_a_second_name_does_not_fit_the_model_and_the_refusal_says_how_to_name_it(tmp_path: Path) -> None:
    root, _, _ = accelerate(tmp_path / "c")
    with pytest.raises(FQNMismatchError, match=r"--part '=pytorch_model_fsdp_0'"):
        migrate(root, tmp_path / "new", parts=[("net", "pytorch_model_fsdp_0")], model=build)
    migrate(root, tmp_path / "new", parts=[("", "pytorch_model_fsdp_0")], model=build)
    assert "model.0.weight" in open_checkpoint(tmp_path / "new").tensors


def test_a_whole_optimizer_beside_a_part_of_rank_files_is_whole(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), old / "model.pt")
    torch.save(optimizer.state_dict(), old / "optimizer.pt")
    for rank in range(2):
        torch.save({"cpu": torch.full((5,), rank, dtype=torch.uint8)}, old / f"rng_state_{rank}.pth")
    parts = [("model", "model.pt"), ("optimizer", "optimizer.pt"), ("rng", "rng_state_{rank}.pth")]
    result = migrate(old, tmp_path / "new", parts=parts, order=["weight", "bias"])
    assert not [note for note in result.notes if "left out" in note]
    one = migrate(old, tmp_path / "one", parts=[("model", "model.pt"), ("rng", "rng_state_1.pth")])
    assert [note for note in one.notes if "rng_state_0.pth" in note] == ["left out, since no --part names it: rng_state_0.pth"]
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert reader.tensor("optimizer.state.bias.exp_avg").equal(optimizer.state[model.bias]["exp_avg"])
