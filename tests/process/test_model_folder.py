"""Files of a neighbour, beside the file of --model and in the temporary folder, neither run nor stop `labkit checkpoint`."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import TESTS
from tests.process.shadows import plant

MODEL = """
import helper
def build():
    import torch, torch._dynamo
    return torch.nn.Linear(2, helper.size)
"""


def verified(folder: Path, model: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR", "XDG_"))}
    given |= {"PYTHONPATH": str(TESTS.parent), "HOME": str(temporary.parent), "TMPDIR": str(temporary)}
    command = [
        str(Path(sys.executable).parent / "labkit"),
        "checkpoint",
        "verify",
        str(folder.parent / "model.pt"),
        "--model",
        model,
    ]
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize("model", ["my_model.py:build", "my_model:build"])
def test_v7_a_module_of_every_name_beside_the_models_file_changes_nothing(model: str, tmp_path: Path) -> None:
    folder, temporary = tmp_path / "shared", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    (folder / "my_model.py").write_text(MODEL)
    (folder / "helper.py").write_text("size = 2")
    plant(folder, tmp_path / "ran")
    torch.save({"model": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "model.pt")
    done = verified(folder, model, temporary)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_v9_a_neighbours_file_in_the_place_of_torchs_cache_stops_no_model(tmp_path: Path) -> None:
    folder, temporary = tmp_path / "mine", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    (temporary / f"torchinductor_{getpass.getuser()}").write_text("a neighbour's")
    (folder / "my_model.py").write_text(MODEL)
    (folder / "helper.py").write_text("size = 2")
    torch.save({"model": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "model.pt")
    done = verified(folder, "my_model.py:build", temporary)
    assert done.returncode == 0, done.stdout + done.stderr
