"""From every form in which FSDP1 code saved its state to a model under FSDP2: weights, moments and the steps after."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

from labkit import checkpoint
from labkit.checkpoint import migrate, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import CheckpointMismatchError, FQNMismatchError, IncompleteCheckpointError
from tests.matrix import matrix
from tests.process.checkpoint_models import Net, adam, fsdp1, fsdp2, train
from tests.process.checkpoint_ranks import Launcher, launcher_fixture  # noqa: F401

FORMS = ["full", "full_optim", "sharded", "sharded_dcp", "local", "raw"]


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def save_old(rank: int, form: str, use_orig_params: bool, folder: str) -> Any:
    """Train under FSDP1, save in one of its forms; return weights and moments from the sharded form as truth."""
    model = fsdp1(Net(), use_orig_params=use_orig_params)
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    state: dict[str, Any] = {"epoch": 3, "rng": {"numbers": [rank, 5]}}
    if form in ("full", "full_optim"):
        # offload_to_cpu=True crashes or shares buffers on the CPU.
        options = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *options):
            state["model"] = model.state_dict()
            state["optim"] = FSDP.optim_state_dict(model, optimizer)
        if form == "full_optim":
            state["optim"] = FSDP.rekey_optim_state_dict(state["optim"], OptimStateKeyType.PARAM_ID, model)
        if rank == 0:
            torch.save(state, f"{folder}/old.pt")
    elif form in ("sharded", "sharded_dcp"):
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state["model"] = model.state_dict()
            state["optim"] = FSDP.optim_state_dict(model, optimizer)
        if form == "sharded":
            torch.save(state, f"{folder}/old_rank{rank}.pt")
        else:
            dcp.save(state, checkpoint_id=f"{folder}/old")
    else:
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state["model"] = model.state_dict()
            state["optim"] = FSDP.optim_state_dict(model, optimizer) if form == "local" else optimizer.state_dict()
        torch.save(state, f"{folder}/old_rank{rank}.pt")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        truth = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(truth, checkpoint_id=f"{folder}.truth")
    return train(model, optimizer, 2, start=2)


def load_new(rank: int, folder: str, how: str) -> Any:
    model = fsdp2(Net(7))
    optimizer = optimizer_of(model)
    if how == "torch":
        state: dict[str, Any] = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/new")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
    else:
        checkpoint.load(f"{folder}/new", {"model": model, "optim": optimizer, "epoch": 0}, ignore=["rng.*"])
    return train(model, optimizer, 2, start=2)


# torch itself refuses to number flat parameters that hold several.
@pytest.mark.parametrize(
    ("form", "use_orig_params"),
    [
        pytest.param(form, flag, marks=[pytest.mark.slow] * (not flag and form != "local"))
        for form in FORMS
        for flag in (True, False)
        if flag or form != "full_optim"
    ],
)
def test_what_fsdp1_saved_trains_on_under_fsdp2_as_if_nothing_had_happened(
    launcher: Launcher, tmp_path: Path, form: str, use_orig_params: bool
) -> None:
    (tmp_path / "saved").mkdir()
    losses = launcher.run(save_old, 2, tmp_path, form, use_orig_params, str(tmp_path / "saved"))
    source = tmp_path / "saved"
    if form in ("full", "full_optim", "sharded_dcp"):
        source /= "old" if form == "sharded_dcp" else "old.pt"
    result = migrate(source, tmp_path / "new", model=Net())
    report = verify(tmp_path / "new", against=tmp_path / "saved.truth", model=Net())
    # Some of FSDP1's forms leave out one of two tied names, and the truth may have both. Only names may differ there: entries
    # that both sides hold must be equal in every bit.
    names = ("missing-key", "unexpected-key")
    tied = ("head.weight", "embed.weight")
    assert [f.line() for f in report.findings if not (f.code in names and f.where in tied)] == []
    assert report.checked["compared tensors"] >= 30
    if form in ("sharded", "local", "raw"):
        assert "rng differs between the rank files and is keyed by rank" in result.notes
    how = "torch" if form == "sharded" else "labkit"
    assert launcher.run(load_new, 2, tmp_path, str(tmp_path), how) == losses


def test_a_local_checkpoint_without_a_rank_or_with_another_model_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    old = tmp_path / "saved"
    old.mkdir()
    launcher.run(save_old, 2, tmp_path, "raw", True, str(old))
    with pytest.raises(FQNMismatchError, match="--model"):
        migrate(old, tmp_path / "new")
    with pytest.raises((CheckpointMismatchError, FQNMismatchError)):
        migrate(old, tmp_path / "new", model=torch.nn.Sequential(torch.nn.Linear(2, 2)))
    (old / "old_rank1.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match="files of all ranks together"):
        migrate(old, tmp_path / "new", model=Net())


def order_as_the_help_says(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Run the lines in ``labkit checkpoint migrate --help`` exactly as they are, and return their output."""
    shown = CliRunner().invoke(command, ["migrate", "--help"], terminal_width=200).output
    lines = [line.strip() for line in shown.splitlines() if line.strip().startswith(("names = ", "print("))]
    assert len(lines) == 2
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec("\n".join(lines), {"model": model, "optimizer": optimizer})
    return out.getvalue().split()


def save_numbered(rank: int, form: str, use_orig_params: bool, inner: bool, folder: str) -> list[str]:
    """Train with two parameter groups, save the optimizer's own numbered state, and give the order of its parameters."""
    net = Net()
    if inner:
        net.block = checkpoint_wrapper(net.block)  # type: ignore[assignment]
    model = fsdp1(net, use_orig_params=use_orig_params)
    optimizer = adam(model)
    train(model, optimizer, 2)
    order = order_as_the_help_says(model, optimizer)
    kinds = {"full": StateDictType.FULL_STATE_DICT, "sharded": StateDictType.SHARDED_STATE_DICT}
    options = [FullStateDictConfig(offload_to_cpu=False)] if form == "full" else []
    with FSDP.state_dict_type(model, kinds.get(form, StateDictType.LOCAL_STATE_DICT), *options):
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, f"{folder}/old_rank{rank}.pt")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        truth = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(truth, checkpoint_id=f"{folder}.truth")
    return order


@pytest.mark.parametrize("inner", matrix(True, False), ids=["checkpointed", "plain"])
@pytest.mark.parametrize("use_orig_params", matrix(False, True))
@pytest.mark.parametrize("form", ["sharded", "full", "local"])
def test_p14_the_order_that_the_help_prints_names_the_numbers_of_every_form(
    launcher: Launcher, tmp_path: Path, form: str, use_orig_params: bool, inner: bool
) -> None:
    old = tmp_path / "saved"
    old.mkdir()
    order, _ = launcher.run(save_numbered, 2, tmp_path, form, use_orig_params, inner, str(old))
    assert any("_flat_param" in name for name in order) is not use_orig_params
    migrate(old, tmp_path / "new", model=Net(), order=order)
    report = verify(tmp_path / "new", against=tmp_path / "saved.truth", model=Net())
    tied = ("head.weight", "embed.weight")
    assert [f.line() for f in report.findings if not (f.code in ("missing-key", "unexpected-key") and f.where in tied)] == []
    assert report.checked["compared tensors"] >= 30
    with pytest.raises(FQNMismatchError, match="--order"):
        migrate(old, tmp_path / "other", model=Net(), order=order[:-1])
    if form != "local":
        with pytest.raises(CheckpointMismatchError, match="not in the optimizer's order"):
            migrate(old, tmp_path / "other", model=Net(), order=order[::-1])


def save_shared_moments(rank: int, folder: str) -> None:
    """A FULL optimizer state with torch's defaults, which on the CPU gives both moments one buffer."""
    model = fsdp1(Net())
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig()
    ):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    if rank == 0:
        torch.save(state, f"{folder}/full.pt")


def load_refused(rank: int, folder: str) -> tuple[str, bool, int]:
    """Return a load's error, whether the model is unchanged, and the number of notes of a load that continues despite it."""
    model = fsdp2(Net(7))
    state = {"model": model, "optim": optimizer_of(model)}
    before = [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    try:
        checkpoint.load(f"{folder}/new", state)
        message = "loaded"
    except checkpoint.VerificationError as error:
        message = str(error)
    same = all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))  # type: ignore[attr-defined]
    report = checkpoint.load(f"{folder}/new", state, despite=["shared-moments"])
    return message, same, len(report.notes)


def test_p2_shared_moments_of_fsdp1_stop_a_migration_and_a_load_on_every_rank(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run(save_shared_moments, 2, tmp_path, str(tmp_path))
    errors = {finding.code for finding in verify(tmp_path / "full.pt").findings if finding.severity == "error"}
    assert errors == {"shared-moments"}
    with pytest.raises(checkpoint.VerificationError, match="--despite shared-moments"):
        migrate(tmp_path / "full.pt", tmp_path / "new", model=Net())
    assert not (tmp_path / "new").exists()
    result = migrate(tmp_path / "full.pt", tmp_path / "new", model=Net(), despite=["shared-moments"])
    outcomes = launcher.run(load_refused, 2, tmp_path, str(tmp_path))
    assert outcomes[0] == outcomes[1]
    message, unchanged, notes = outcomes[0]
    assert "Nothing was loaded" in message
    assert "[shared-moments]" in message
    assert unchanged
    assert notes == len(result.accepted) > 0
