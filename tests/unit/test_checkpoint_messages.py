"""Messages to people: one clear sentence with the next step, in the right number."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from labkit import checkpoint
from labkit.checkpoint import Reader, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import CheckpointError, FQNMismatchError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model's state beside an optimizer's whose parameters share one step count, as some of FSDP1's forms have it."""
    step = torch.tensor(3.0)
    state = {name: {"exp_avg": torch.ones(2), "step": step} for name in ("a", "b")}
    groups = [{"lr": 0.1, "params": ["a", "b"]}]
    torch.save(
        {"model": {"a": torch.ones(2), "b": torch.ones(2)}, "optim": {"state": state, "param_groups": groups}, "epoch": 1},
        tmp_path / "x.pt",
    )
    return tmp_path / "x.pt"


def build() -> nn.Module:
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    return model


def fails() -> nn.Module:
    raise RuntimeError("no such file: weights.pt")


def run(*arguments: Any) -> str:
    return CliRunner().invoke(command, [str(argument) for argument in arguments]).output


def test_a_function_that_builds_the_model_is_taken_like_its_name(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("from tests.unit.test_checkpoint_messages import build\n")
    for model in (build, build(), f"{tmp_path / 'models.py'}:build"):
        assert verify(saved, model=model).findings == []
    migrate(saved, tmp_path / "out", model=build)
    assert verify(tmp_path / "out", against=saved).findings == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (fails, "fails raised RuntimeError: no such file: weights.pt. It is called without arguments, on torch's meta device"),
        (dict, "returned dict, not a torch.nn.Module"),
        (3, "model=3 is not a model"),
        ("nowhere:build", "nowhere"),
    ],
)
def test_what_builds_no_model_is_named(saved: Path, tmp_path: Path, model: Any, words: str) -> None:
    for work in (lambda: verify(saved, model=model), lambda: migrate(saved, tmp_path / "out", model=model)):
        with pytest.raises(CheckpointError, match=words):
            work()
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_is_answered_with_close_ones(saved: Path) -> None:
    with Reader(open_checkpoint(saved)) as reader:
        for call, words in (
            (lambda: reader.tensor("model.aa"), r"model\.aa\nClose to it: model\.a"),
            (lambda: reader.value("epohc"), r"epohc\nClose to it: epoch"),
            (lambda: reader.tensor("epoch"), r"Read it with value\(\)"),
            (lambda: reader.value("model.a"), r"Read it with tensor\(\)"),
            (lambda: reader.tensor("zzzz"), "Checkpoint.tensors and Checkpoint.values list"),
        ):
            with pytest.raises(FQNMismatchError, match=words):
                call()


def test_a_shared_step_count_is_no_tie_and_the_counts_add_up(saved: Path) -> None:
    text = run("show", saved)
    assert "8 tensors" not in text
    assert "6 tensors" in text
    assert "model: 2 tensors" in text
    assert "optimizer: 4 tensors" in text
    assert "tied" not in text


def test_one_of_a_kind_is_in_the_singular(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "one.pt")
    texts = [
        run("show", tmp_path / "one.pt"),
        run("migrate", tmp_path / "one.pt", tmp_path / "out"),
        run("verify", tmp_path / "out"),
    ]
    assert "1 tensor, 4 B, in 1 chunk; 0 other values; 1 file" in texts[0]
    assert "model: 1 tensor, 1 element," in texts[0]
    assert "1 tensor, 4 B, in 1 file, verified" in texts[1]
    assert "1 file, 1 tensor, 1 chunk" in texts[2]
    (tmp_path / "cut.pt").write_bytes((tmp_path / "one.pt").read_bytes()[:100])
    assert run("verify", tmp_path / "cut.pt").endswith("cut.pt: 1 error\n")
    assert ".. Consequence" not in run("verify", tmp_path / "cut.pt")


def test_a_checkpoint_shows_itself_in_one_line_and_show_takes_a_path(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert repr(open_checkpoint(saved)) == f"<Checkpoint {saved}: torch, 6 tensors, 40 bytes>"
    checkpoint.show(saved)
    assert "torch.save" in capsys.readouterr().out


def test_pieces_of_moments_in_rank_files_are_no_differing_copies(tmp_path: Path) -> None:
    for rank, numel in enumerate((3, 2)):
        state = {0: {"exp_avg": torch.full((numel,), float(rank)), "step": torch.tensor(1.0)}}
        groups = [{"lr": 0.1, "params": [0]}]
        torch.save(
            {"model": {"a": torch.ones(5)}, "optim": {"state": state, "param_groups": groups}}, tmp_path / f"x_rank{rank}.pt"
        )
    report = verify(tmp_path)
    assert [finding.code for finding in report.findings] == ["numbered-state"]
    assert any("migrate joins them with the help of the model" in text for text in report.unchecked)


def test_patterns_that_match_nothing_are_told(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "table").write_text("nowhere.* -> somewhere.*\na -> c\n")
    text = run("migrate", saved, tmp_path / "out", "--dtype", "layer*=bfloat16", "--rename", tmp_path / "table")
    for words in ("dtype pattern 'layer*'", "rename pattern 'nowhere.*'"):
        assert f"note: the {words} matches nothing" in text
    assert "'a'" not in text


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda saved, out: reshard(saved, out, "dp=x"), "cannot read the mesh"),
        (lambda saved, out: reshard(saved, out, 0), "has no ranks. Every axis has at least 1"),
        (lambda saved, out: migrate(saved, out, dtypes={"*": "bfloat16"}), "is not a torch.dtype"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(saved: Path, tmp_path: Path, work: Callable[..., Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        work(saved, tmp_path / "out")


def test_a_mesh_may_be_written_as_on_the_command_line(saved: Path, tmp_path: Path) -> None:
    reshard(saved, tmp_path / "out", "dp=2,tp=1")
    assert verify(tmp_path / "out", against=saved).findings == []


def test_a_missing_table_is_named(saved: Path, tmp_path: Path) -> None:
    assert "does not exist" in run("migrate", saved, tmp_path / "out", "--rename", tmp_path / "none")


@pytest.mark.parametrize("arguments", [("show",), ("verify",), ("migrate", "out"), ("reshard", "out", "--ranks", "2")])
def test_a_file_that_may_not_be_read_is_one_message(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    opened = os.open

    def refused(path: Any, *arguments: Any, **options: Any) -> int:
        if path == saved:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    name, *rest = (str(tmp_path / part) if part == "out" else part for part in arguments)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        text = run(name, saved, *rest)
    assert text == f"Error: {saved}: Permission denied\n"


def test_a_refusal_of_several_lines_is_shown_by_verify_as_it_is_and_names_in_it_are_escaped(tmp_path: Path) -> None:
    root = tmp_path / "two\nlines"
    for name in ("last.ckpt", "be\nst.ckpt"):
        root.mkdir(exist_ok=True)
        torch.save({"w": torch.ones(2, 2)}, root / name)
    told = CliRunner().invoke(command, ["verify", str(root)])
    lines = told.output.splitlines()
    assert lines[0].startswith("error: ")
    assert "two\\nlines: it holds 2 checkpoints" in lines[0]
    assert lines[1:3] == ["  - be\\nst.ckpt  (torch.save)", "  - last.ckpt  (torch.save)"]
    assert lines[3].startswith("Name one of them")
    assert lines[3].endswith("[unreadable]")
    assert len(lines) == 5
    (finding,) = verify(root).findings
    assert finding.what.startswith("it holds 2 checkpoints")


def test_names_in_findings_cannot_make_lines_of_their_own(tmp_path: Path) -> None:
    fake = "w\nerror: nothing: all is lost"
    torch.save({fake: torch.tensor([float("nan")]), f"module.{fake}": torch.ones(2)}, tmp_path / "x.pt")
    told = CliRunner().invoke(command, ["verify", str(tmp_path / "x.pt"), "--finite"])
    assert not any(line.startswith("error: nothing") for line in told.output.splitlines())
    with pytest.raises(CheckpointError) as caught:
        migrate(tmp_path / "x.pt", tmp_path / "new", model=lambda: torch.nn.Linear(2, 2))
    assert not any(line.startswith("error: nothing") for line in str(caught.value).splitlines())
