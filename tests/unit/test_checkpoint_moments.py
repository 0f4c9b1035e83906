"""Moments have their parameter's shape: an order that gives them another shape is wrong, and is never called verified."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn

from labkit.checkpoint import Reader, load, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import CheckpointMismatchError, VerificationError

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda ps: torch.optim.AdamW(ps, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    "sgd": lambda ps: torch.optim.SGD(ps, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build()
    optimizer = make(list(model.parameters()))
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(folder: Path, name: str = "adamw") -> tuple[nn.Module, torch.optim.Optimizer, Path]:
    model, optimizer = trained(OPTIMIZERS[name])
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, folder / "x.pt")
    return model, optimizer, folder / "x.pt"


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    state = {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    change(state)
    groups = [{"lr": 0.1, "params": list(state)}]
    return {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_order_that_the_checkpoints_own_shapes_contradict_is_refused_without_a_model_too(tmp_path: Path, name: str) -> None:
    model, optimizer, file = saved(tmp_path, name)
    messages = []
    for source in (None, build):
        with pytest.raises(CheckpointMismatchError, match=r"optim\.state\.\S+ has shape .*, and the parameter has ") as caught:
            migrate(file, tmp_path / "wrong", order=[NAMES[index] for index in (1, 0, 3, 2)], model=source)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert not (tmp_path / "wrong").exists()
    for index, source in enumerate((None, build)):
        migrate(file, tmp_path / f"right{index}", order=NAMES, model=source)
        assert verify(tmp_path / f"right{index}").ok
        with Reader(open_checkpoint(tmp_path / f"right{index}")) as reader:
            for parameter_name, parameter in model.named_parameters():
                for piece, value in optimizer.state[parameter].items():
                    assert torch.equal(reader.tensor(f"optim.state.{parameter_name}.{piece}"), value)


def test_the_command_refuses_an_order_that_shapes_contradict(tmp_path: Path) -> None:
    _, _, file = saved(tmp_path)
    order = tmp_path / "order.txt"
    order.write_text("\n".join(reversed(NAMES)))
    result = CliRunner().invoke(command, ["migrate", str(file), str(tmp_path / "new"), "--order", str(order)])
    assert result.exit_code == 1
    assert "optim.state.1.bias.exp_avg has shape (7, 5), and the parameter has (3,)" in result.output
    assert "The names are not in the optimizer's order" in result.output


@pytest.mark.parametrize("wrapper", ["", "module.", "_fsdp_wrapped_module."])
def test_moments_of_another_shape_are_an_error_of_verify_and_stop_what_copies_or_loads_them(tmp_path: Path, wrapper: str) -> None:
    model, optimizer = trained(torch.optim.AdamW)

    def swap(state: dict[str, Any]) -> None:
        state["0.bias"], state["1.bias"] = state["1.bias"], state["0.bias"]

    content = by_name(model, optimizer, swap)
    content["model"] = {wrapper + name: tensor for name, tensor in content["model"].items()}
    torch.save(content, tmp_path / "x.pt")
    dcp.save(content, checkpoint_id=tmp_path / "d", no_dist=True)
    for path in (tmp_path / "x.pt", tmp_path / "d"):
        found = [finding for finding in verify(path).findings if finding.code == "misshapen-state"]
        assert [finding.where for finding in found] == [
            f"optim.state.{name}.{piece}" for name in ("0.bias", "1.bias") for piece in ("exp_avg", "exp_avg_sq")
        ]
        assert {finding.severity for finding in found} == {"error"}
        assert found[0].what == "it has shape (3,), and the parameter has (7,)"
        assert not verify(path, data=False).ok
        with pytest.raises(VerificationError, match="misshapen-state"):
            migrate(path, tmp_path / "new")
        with pytest.raises(VerificationError, match="misshapen-state"):
            reshard(path, tmp_path / "new", 2)
        with pytest.raises(VerificationError, match="misshapen-state"):
            load(path, copy.deepcopy(content))
        assert not (tmp_path / "new").exists()
    migrate(tmp_path / "d", tmp_path / "alone", drop=["optim.*"])
    result = migrate(tmp_path / "d", tmp_path / "new", despite=["misshapen-state"])
    assert {finding.code for finding in result.accepted} == {"misshapen-state"}


def other_optimizer(state: dict[str, Any]) -> None:
    for pieces in state.values():
        moment = pieces.pop("exp_avg")
        pieces["preconditioner"] = torch.eye(moment.shape[0])
        pieces["count"] = torch.ones(1)


def low_rank(state: dict[str, Any]) -> None:
    for pieces in state.values():
        pieces["exp_avg"], pieces["exp_avg_sq"] = torch.ones(2, 2), torch.ones(2, 2) * 2
        pieces["projector"] = torch.ones(2, 7)


def a_state_of_its_own(state: dict[str, Any]) -> None:
    state["log_alpha"] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4) * 2}


@pytest.mark.parametrize("change", [other_optimizer, low_rank, a_state_of_its_own])
def test_state_of_which_nobody_knows_its_shape_is_not_accused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    torch.save(by_name(model, optimizer, change), tmp_path / "x.pt")
    assert not [finding for finding in verify(tmp_path / "x.pt").findings if finding.code == "misshapen-state"]


def test_numbered_state_of_an_unknown_optimizer_is_held_to_its_parameters_shapes_where_it_has_them(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    state = optimizer.state_dict()
    for pieces in state["state"].values():
        pieces["momentum_of_its_own"] = pieces.pop("exp_avg")
    torch.save({"model": model.state_dict(), "optim": state}, tmp_path / "x.pt")
    with pytest.raises(CheckpointMismatchError, match=r"momentum_of_its_own has shape \(7, 5\), and the parameter has \(7,\)"):
        migrate(tmp_path / "x.pt", tmp_path / "new", order=[NAMES[index] for index in (1, 0, 3, 2)])
    for pieces in state["state"].values():
        pieces.pop("momentum_of_its_own")
        pieces["exp_avg_sq"] = pieces["exp_avg_sq"][:1]
        pieces["scale"] = torch.ones(2, 1)
    torch.save({"model": model.state_dict(), "optim": state}, tmp_path / "y.pt")
    migrate(tmp_path / "y.pt", tmp_path / "new", model=build)


def test_a_parameter_of_two_models_may_have_the_shape_of_either(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    content = by_name(model, optimizer, lambda state: None)
    other = {name: torch.ones(2, 2) for name in content["model"]}
    torch.save({"teacher": other, **content}, tmp_path / "x.pt")
    assert verify(tmp_path / "x.pt").ok


def test_shares_of_moments_in_rank_files_are_not_accused(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    numbered = optimizer.state_dict()
    for rank in range(2):
        shares = {
            number: {piece: value if value.ndim == 0 else value.flatten().tensor_split(2)[rank] for piece, value in pieces.items()}
            for number, pieces in numbered["state"].items()
        }
        named = {NAMES[number]: pieces for number, pieces in shares.items()}
        groups = [{"lr": 0.1, "params": NAMES}]
        for kind, state in (("numbered", {**numbered, "state": shares}), ("named", {"state": named, "param_groups": groups})):
            (tmp_path / kind).mkdir(exist_ok=True)
            torch.save({"model": model.state_dict(), "optim": state}, tmp_path / kind / f"rank_{rank}.pt")
    for kind in ("numbered", "named"):
        report = verify(tmp_path / kind / "rank_{rank}.pt")
        assert not [finding for finding in report.findings if finding.code == "misshapen-state"]
    migrate(tmp_path / "numbered/rank_{rank}.pt", tmp_path / "new", model=build)
    assert verify(tmp_path / "new").ok
