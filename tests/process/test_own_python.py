"""No process of labkit's own imports from the user's working directory, where a neighbour may have put a file."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from labkit.base.own_python import with_folder
from tests.conftest import TESTS

POOL = """
import labkit
if __name__ == "__main__":
    with labkit.WorkerPool(2, device="cpu"{options}) as pool:
        print(pool.run(lambda: 1).same())
"""
PLAN = """
from labkit.plan import TrainingJob, make_plan
import torch
def build():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    return model
if __name__ == "__main__":
    job = TrainingJob(build, "dp=2", loss=lambda model, batch: model.layers[0](batch).sum(), batch=(2, 2), batch_dtype="float32")
    print(make_plan(job) and 1)
"""
PROGRAMS = {
    "fork server": POOL.format(options=""),
    "spawn": "import os\nos.environ['LABKIT_START'] = 'spawn'\n" + POOL.format(options=""),
    "agents": POOL.format(options=", launcher='agents'"),
    "plan": PLAN,
    "GPUs counted": "from labkit.controller.start.launchers.spawn import SpawnLauncher\nprint(SpawnLauncher().count_gpus() + 1)",
}


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with a neighbour's modules; each leaves a mark when it is imported."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("torch", "psutil", "argparse", "pickle", "numpy", "zmq", "labkit"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise ImportError('planted')")
    return folder


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    # An empty entry means the working directory.
    environ = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_h1_a_neighbours_module_in_the_working_directory_is_not_imported(program: str, planted: Path) -> None:
    script = planted.parent / "program.py"
    script.write_text(program)
    result = run([sys.executable, str(script)], planted)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1:] == ["1"]
    assert not (planted.parent / "ran").exists()


@pytest.mark.parametrize("arguments", [["doctor"], ["--version"], ["checkpoint", "show", "missing.pt"]], ids=lambda words: words[0])
def test_h1_nor_by_a_command(arguments: list[str], planted: Path) -> None:
    run([str(Path(sys.executable).parent / "labkit"), *arguments], planted)
    assert not (planted.parent / "ran").exists()


def test_h3_a_folder_goes_behind_the_standard_library_and_before_what_is_installed() -> None:
    python = sysconfig.get_path("stdlib")
    path = ["/given/site-packages", "", "/mine", python, f"{python}/lib-dynload", "/venv/lib/site-packages", "/more"]
    at = with_folder(path, "/mine")
    assert at == ["/given/site-packages", python, f"{python}/lib-dynload", "/mine", "/venv/lib/site-packages", "/more"]
    assert with_folder(["/a", python], "") == ["/a", python, ""]
