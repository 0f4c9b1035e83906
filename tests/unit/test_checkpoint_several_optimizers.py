"""Several optimizers that each number their parameters are named in one run, each by an order of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint.state_dict import set_state_dict

from labkit.checkpoint import Reader, migrate, open_checkpoint, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import CheckpointError, FQNMismatchError

Both = dict[str, tuple[nn.Module, torch.optim.Optimizer]]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))


def two_nets() -> nn.Module:
    return nn.ModuleDict({"generator": net(), "discriminator": net()})


def trained() -> Both:
    torch.manual_seed(0)
    both: Both = {}
    for name in ("generator", "discriminator"):
        model = net()
        optimizer = torch.optim.AdamW(list(model.parameters())[:: 1 if name == "generator" else -1])
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        both[name] = model, optimizer
    return both


def in_dicts(both: Both) -> dict[str, Any]:
    optimizers = {f"{name[0]}_optimizer": optimizer.state_dict() for name, (_, optimizer) in both.items()}
    return {name: model.state_dict() for name, (model, _) in both.items()} | optimizers | {"epoch": 1}


def in_a_list(both: Both) -> dict[str, Any]:
    weights = {f"{name}.{key}": value for name, (model, _) in both.items() for key, value in model.state_dict().items()}
    return {"model": weights, "optimizer": [optimizer.state_dict() for _, optimizer in both.values()]}


def names_of(both: Both, name: str, prefix: str = "") -> list[str]:
    model, optimizer = both[name]
    names = {id(parameter): f"{prefix}{key}" for key, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def check(path: Path, both: Both, roots: dict[str, str], prefixed: bool) -> None:
    assert verify(path).ok
    with Reader(open_checkpoint(path)) as reader:
        for name, (model, optimizer) in both.items():
            prefix = f"{name}." if prefixed else ""
            assert reader.value(f"{roots[name]}.param_groups.0.params") == names_of(both, name, prefix)
            for key, parameter in model.named_parameters():
                for piece, value in optimizer.state[parameter].items():
                    assert torch.equal(reader.tensor(f"{roots[name]}.state.{prefix}{key}.{piece}"), value)


@pytest.mark.parametrize(
    ("layout", "roots", "prefixed"),
    [
        (in_dicts, {"generator": "g_optimizer", "discriminator": "d_optimizer"}, False),
        (in_a_list, {"generator": "optimizer.0", "discriminator": "optimizer.1"}, True),
    ],
)
def test_the_advice_for_several_optimizers_followed_to_the_letter_gives_one_checkpoint_with_all(
    tmp_path: Path, layout: Callable[[Both], dict[str, Any]], roots: dict[str, str], prefixed: bool
) -> None:
    both = trained()
    torch.save(layout(both), tmp_path / "x.pt")
    start = ["migrate", str(tmp_path / "x.pt"), str(tmp_path / "new")]
    refused = CliRunner().invoke(command, start)
    assert refused.exit_code == 1
    (advised,) = re.findall(r"\(((?:--order \S+=FILE ?)+)\)", refused.output)
    assert advised == " ".join(f"--order {root}=FILE" for root in roots.values())
    for root, name in zip(roots.values(), both, strict=True):
        file = tmp_path / f"{root}.txt"
        file.write_text("\n".join(names_of(both, name, f"{name}." if prefixed else "")))
        advised = advised.replace(f"{root}=FILE", f"{root}={file}")
    told = CliRunner().invoke(command, [*start, *advised.split()])
    assert told.exit_code == 0, told.output
    check(tmp_path / "new", both, roots, prefixed)


def test_several_optimizers_are_named_by_a_model_of_both(tmp_path: Path) -> None:
    both = trained()
    torch.save(in_dicts(both), tmp_path / "x.pt")
    order = {f"{name[0]}_optimizer": names_of(both, name, f"{name}.") for name in both}
    migrate(tmp_path / "x.pt", tmp_path / "new", model=two_nets, order=order)
    check(tmp_path / "new", both, {name: f"{name[0]}_optimizer" for name in both}, True)
    with pytest.raises(FQNMismatchError, match="each number the parameters in their own way"):
        migrate(tmp_path / "x.pt", tmp_path / "other", model=two_nets)


def test_the_moments_of_one_of_several_optimizers_are_checked_too(tmp_path: Path) -> None:
    both = trained()
    torch.save(in_dicts(both), tmp_path / "x.pt")
    order = {"g_optimizer": names_of(both, "generator"), "d_optimizer": names_of(both, "generator")}
    with pytest.raises(CheckpointError, match=r"d_optimizer\.state\.0\.weight\.exp_avg has shape \(4,\)"):
        migrate(tmp_path / "x.pt", tmp_path / "new", order=order)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (["0.weight"], r"(?s)g_optimizer, d_optimizer each number.*--order g_optimizer=FILE --order d_optimizer=FILE"),
        ({"g_optimizer": ["0.weight"]}, r"d_optimizer each number|g_optimizer, d_optimizer each number"),
        ({"g_optimiser": []}, r"order is for g_optimiser, .* \(did you mean g_optimizer\?\)"),
    ],
)
def test_an_order_that_does_not_say_whose_it_is_is_refused(tmp_path: Path, order: Any, words: str) -> None:
    torch.save(in_dicts(trained()), tmp_path / "x.pt")
    with pytest.raises(FQNMismatchError, match=words):
        migrate(tmp_path / "x.pt", tmp_path / "new", order=order)


def test_the_order_of_one_optimizer_may_say_whose_it_is(tmp_path: Path) -> None:
    both = trained()
    model, optimizer = both["discriminator"]
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "x.pt")
    migrate(tmp_path / "x.pt", tmp_path / "new", order={"optim": names_of(both, "discriminator")})
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        for key, parameter in model.named_parameters():
            assert torch.equal(reader.tensor(f"optim.state.{key}.exp_avg"), optimizer.state[parameter]["exp_avg"])


def test_orders_on_the_command_line_that_contradict_each_other_or_are_not_there_are_refused(tmp_path: Path) -> None:
    torch.save(in_dicts(trained()), tmp_path / "x.pt")
    (tmp_path / "a=b.txt").write_text("w")
    start = ["migrate", str(tmp_path / "x.pt"), str(tmp_path / "new")]
    for orders, words in (
        ([tmp_path / "a=b.txt", tmp_path / "a=b.txt"], "say of each"),
        ([f"g_optimizer={tmp_path}/a=b.txt", f"g_optimizer={tmp_path}/a=b.txt"], "twice"),
        ([f"g_optimizer={tmp_path}/none.txt"], "none.txt"),
        ([tmp_path / "none.txt"], "none.txt"),
    ):
        result = CliRunner().invoke(command, [*start, *(str(part) for order in orders for part in ("--order", order))])
        assert result.exit_code != 0
        assert words in result.output


def test_names_of_an_order_lose_the_wrappers_that_the_model_loses(tmp_path: Path) -> None:
    moments = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"module.norm.bias": torch.zeros(2)}, "opt": moments}, tmp_path / "x.pt")
    for index, name in enumerate(("norm.bias", "module.norm.bias", "_orig_mod.module.norm.bias")):
        migrate(tmp_path / "x.pt", tmp_path / f"new{index}", order=[name])
        assert set(open_checkpoint(tmp_path / f"new{index}").tensors) == {"model.norm.bias", "opt.state.norm.bias.exp_avg"}


def twins() -> Both:
    """Two networks of one class, so that the names and shapes of both are the same."""
    torch.manual_seed(0)
    both: Both = {}
    for name in ("netG", "netD"):
        model = net()
        optimizer = torch.optim.AdamW(list(model.parameters())[::-1])
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        both[name] = model, optimizer
    return both


def home_made(both: Both) -> dict[str, Any]:
    return {name: model.state_dict() for name, (model, _) in both.items()} | {
        f"opt{name[3:]}": optimizer.state_dict() for name, (_, optimizer) in both.items()
    }


@pytest.mark.parametrize("heads", [("", ""), ("netG.", "netD."), ("", "netD."), ("netG.", "")])
def test_state_beside_models_of_its_own_is_written_under_the_names_in_them_and_torch_loads_it(
    tmp_path: Path, heads: tuple[str, str]
) -> None:
    both = twins()
    torch.save(home_made(both), tmp_path / "x.pt")
    order = {f"opt{name[3:]}": names_of(both, name, head) for name, head in zip(both, heads, strict=True)}
    migrate(tmp_path / "x.pt", tmp_path / "new", order=order)
    check(tmp_path / "new", both, {"netG": "optG", "netD": "optD"}, False)
    migrate(tmp_path / "x.pt", tmp_path / "new.pt", order=order)
    saved = torch.load(tmp_path / "new.pt", weights_only=True)
    for name, (model, optimizer) in both.items():
        again = net()
        fresh = torch.optim.AdamW(again.parameters())
        set_state_dict(again, fresh, model_state_dict=saved[name], optim_state_dict=saved[f"opt{name[3:]}"])
        for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(optimizer.state[mine]["exp_avg"], fresh.state[theirs]["exp_avg"])


@pytest.mark.parametrize("layout", [home_made, in_a_list])
def test_a_parameter_that_the_orders_of_two_optimizers_name_is_refused(tmp_path: Path, layout: Callable[[Both], Any]) -> None:
    both = twins()
    torch.save(layout(both), tmp_path / "x.pt")
    roots = ("optG", "optD") if layout is home_made else ("optimizer.0", "optimizer.1")
    key = "netG.0.weight" if layout is home_made else "model.netG.0.weight"
    with pytest.raises(FQNMismatchError, match=rf"{roots[0]} and {roots[1]} would both have {key}"):
        migrate(tmp_path / "x.pt", tmp_path / "new", order=dict.fromkeys(roots, names_of(both, "netG", "netG.")))
    assert not (tmp_path / "new").exists()


def test_one_parameter_that_the_orders_of_two_optimizers_name_is_refused_with_a_model_too(tmp_path: Path) -> None:
    torch.save(in_dicts(trained()), tmp_path / "x.pt")
    order = {f"{name[0]}_optimizer": names_of(trained(), name, f"{name}.") for name in ("generator", "discriminator")}
    order["d_optimizer"][0] = "generator.1.bias"
    with pytest.raises(FQNMismatchError, match=r"g_optimizer and d_optimizer would both have generator\.1\.bias"):
        migrate(tmp_path / "x.pt", tmp_path / "new", model=two_nets, order=order)


def test_three_optimizers_do_not_share_two_models_of_the_same_names(tmp_path: Path) -> None:
    both = twins()
    state = home_made(both)
    torch.save(state | {"optE": state["optD"]}, tmp_path / "x.pt")
    with pytest.raises(FQNMismatchError, match=r"optG and optD and optE would have the same parameters, which are in 2 models"):
        migrate(tmp_path / "x.pt", tmp_path / "new", order=dict.fromkeys(("optG", "optD", "optE"), names_of(both, "netG")))


@pytest.mark.parametrize(
    ("head", "hint"),
    [("netG.", r"did you mean netD\.1\.bias\?"), ("", r"did you mean (netG\.1\.bias or netD|netD\.1\.bias or netG)\.1\.bias\?")],
)
def test_a_misspelled_name_is_answered_with_names_that_are_free(tmp_path: Path, head: str, hint: str) -> None:
    both = twins()
    torch.save(home_made(both), tmp_path / "x.pt")
    order = {"optG": names_of(both, "netG", head), "optD": names_of(both, "netD", "netX.")}
    with pytest.raises(FQNMismatchError, match=rf"order names netX\.1\.bias, .*{hint}"):
        migrate(tmp_path / "x.pt", tmp_path / "new", order=order)


def test_a_misspelled_name_is_answered_with_names_of_its_shape(tmp_path: Path) -> None:
    both = trained()
    model, optimizer = both["generator"]
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "x.pt")
    names = names_of(both, "generator")
    names[names.index("1.weight")] = "0.weighty"
    with pytest.raises(FQNMismatchError, match=r"order names 0\.weighty, .*\(did you mean 1\.weight\?\)"):
        migrate(tmp_path / "x.pt", tmp_path / "new", order=names)


@pytest.mark.parametrize("heads", [("", ""), ("model.", "model."), ("s0.model.", "model.")])
def test_stages_read_as_parts_are_named_by_the_names_in_their_own_model(tmp_path: Path, heads: tuple[str, str]) -> None:
    both = twins()
    (tmp_path / "old").mkdir()
    for stage, (model, optimizer) in enumerate(both.values()):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"old/stage_{stage}.pt")
    order = {f"s{stage}.optimizer": names_of(both, name, heads[stage]) for stage, name in enumerate(both)}
    parts = [(f"s{stage}", f"stage_{stage}.pt") for stage in range(2)]
    migrate(tmp_path / "old", tmp_path / "new", parts=parts, order=order)
    check(tmp_path / "new", both, {"netG": "s0.optimizer", "netD": "s1.optimizer"}, False)
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert torch.equal(reader.tensor("s1.model.0.weight"), both["netD"][0].state_dict()["0.weight"])


def test_a_name_that_two_dicts_may_mean_is_refused_with_both(tmp_path: Path) -> None:
    moments = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    torch.save({"a": {"b.w": torch.ones(2)}, "b": {"w": torch.ones(2)}, "opt": moments}, tmp_path / "x.pt")
    with pytest.raises(FQNMismatchError, match=r"b\.w in the order for opt may be a\.b\.w or b\.w"):
        migrate(tmp_path / "x.pt", tmp_path / "new", order=["b.w"])
    migrate(tmp_path / "x.pt", tmp_path / "new", order=["a.b.w"])
    assert "opt.state.b.w.exp_avg" in open_checkpoint(tmp_path / "new").tensors


def test_one_optimizer_of_several_models_keeps_names_with_those_of_the_dicts(tmp_path: Path) -> None:
    moments = {"state": {n: {"exp_avg": torch.full((2,), float(n))} for n in range(2)}, "param_groups": [{"params": [0, 1]}]}
    torch.save({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}, "opt": moments}, tmp_path / "x.pt")
    migrate(tmp_path / "x.pt", tmp_path / "new", order=["b.w", "a.w"])
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert torch.equal(reader.tensor("opt.state.b.w.exp_avg"), torch.zeros(2))
        assert torch.equal(reader.tensor("opt.state.a.w.exp_avg"), torch.ones(2))
    with pytest.raises(FQNMismatchError, match=r"none of a, b has all names of the order for opt"):
        migrate(tmp_path / "x.pt", tmp_path / "other", order=["w", "b.w"])
