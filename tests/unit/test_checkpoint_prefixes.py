"""Mismatched names: both sides are shown, each fact is reported once, and a change of prefix can be copied from the message."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from labkit.checkpoint import migrate, open_checkpoint, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.convert.rename import Rule
from labkit.checkpoint.errors import FQNMismatchError

MODEL = """
import torch
def build():
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)) for _ in range(5)))
def wrapped():
    return torch.nn.ModuleDict({"net": build()})
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model.py"


def state(prefix: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)) for _ in range(5)))
    return {prefix + name: tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("content", "build"),
    [
        ({"state_dict": state("net."), "epoch": 3}, "build"),
        (state("net."), "build"),
        (state(""), "wrapped"),
        (state("backbone.inner."), "wrapped"),
    ],
    ids=["lightning", "prefix", "none", "another"],
)
def test_one_prefix_that_differs_is_named_with_the_rename_table_that_mends_it(
    models: Path, tmp_path: Path, content: dict[str, object], build: str
) -> None:
    torch.save(content, tmp_path / "x.pt")
    arguments = ["migrate", str(tmp_path / "x.pt"), str(tmp_path / "new"), "--model", f"{models}:{build}"]
    refused = CliRunner().invoke(command, arguments)
    assert refused.exit_code == 1
    (echo,) = re.findall(r"echo '.*' > names\.txt", refused.output)
    subprocess.run(echo, shell=True, check=True, cwd=tmp_path)
    result = CliRunner().invoke(command, [*arguments, "--rename", "names.txt"])
    assert result.exit_code == 0, result.output
    (finding,) = verify(tmp_path / "x.pt", model=f"{models}:{build}").findings
    assert (finding.severity, finding.code) == ("error", "missing-key")
    assert "20 names" in finding.what
    assert echo in finding.what


def test_a_refusal_shows_names_of_both_sides(models: Path, tmp_path: Path) -> None:
    torch.save({f"other{number}.x": torch.ones(2, 2) for number in range(9)}, tmp_path / "x.pt")
    with pytest.raises(FQNMismatchError) as caught:
        migrate(tmp_path / "x.pt", tmp_path / "new", model=f"{models}:build")
    text = str(caught.value)
    assert len(caught.value.missing) == 20
    assert text.count("missing in the checkpoint: ") == 5
    assert "and 15 more" in text
    assert text.count("unexpected in the checkpoint: ") == 5
    assert "and 4 more" in text
    assert "echo" not in text
    found = {finding.code: finding for finding in verify(tmp_path / "x.pt", model=f"{models}:build").findings}
    assert found.keys() == {"missing-key", "unexpected-key"}
    assert "20 tensors" in found["missing-key"].what
    assert "other0.x, other1.x, other2.x and 6 more" in found["unexpected-key"].what


def test_a_few_names_that_differ_are_a_finding_each(models: Path, tmp_path: Path) -> None:
    content = state("")
    del content["0.0.weight"], content["3.1.bias"]
    torch.save(content, tmp_path / "x.pt")
    findings = verify(tmp_path / "x.pt", model=f"{models}:build").findings
    assert [(finding.code, finding.where) for finding in findings] == [("missing-key", "0.0.weight"), ("missing-key", "3.1.bias")]


def test_numbered_state_against_named_is_one_finding(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "old.pt")
    migrate(tmp_path / "old.pt", tmp_path / "new", model=model)
    report = verify(tmp_path / "new", against=tmp_path / "old.pt")
    (finding,) = report.findings
    assert (finding.severity, finding.code) == ("error", "numbered-state")
    assert "36 tensors" in finding.what
    assert "0.exp_avg" in finding.what
    assert "0.weight.exp_avg" in finding.what
    assert report.checked["compared tensors"] == 12
    (back,) = [finding for finding in verify(tmp_path / "old.pt", against=tmp_path / "new").findings if finding.severity == "error"]
    assert back.code == "numbered-state"


def test_names_that_differ_from_the_other_checkpoint_by_a_prefix_are_one_finding(tmp_path: Path) -> None:
    torch.save(state(""), tmp_path / "a.pt")
    torch.save({"state_dict": state("net.")}, tmp_path / "b.pt")
    (finding,) = verify(tmp_path / "a.pt", against=tmp_path / "b.pt").findings
    assert finding.code == "missing-key"
    assert "20 names" in finding.what
    migrate(tmp_path / "b.pt", tmp_path / "c.pt", rules=[Rule("net.*", "*")])
    assert verify(tmp_path / "a.pt", against=tmp_path / "c.pt").findings == []
    assert len(open_checkpoint(tmp_path / "c.pt").tensors) == 20
