"""``labkit doctor`` finds the problems of a machine, and gives advice on each."""

from __future__ import annotations

import importlib.metadata
import io
import json
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from labkit import doctor
from labkit.base import machine
from labkit.cli import main
from labkit.course.learner.cli import PRIVATE
from labkit.doctor import Finding

GIB = 2**30
GPU = machine.Gpu(0, "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, "550.54")


def _one(look: Callable[[], Iterator[Finding]], name: str) -> Finding:
    (finding,) = [finding for finding in look() if finding.name == name]
    return finding


def test_the_packages_of_this_environment_are_all_in_range() -> None:
    findings = list(doctor._packages())
    assert {"torch", "jupyterlab", "papermill", "matplotlib", "ipywidgets"} <= {finding.name for finding in findings}
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert "pytest" not in {finding.name for finding in findings}


@pytest.fixture
def requires(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that labkit has other requirements."""

    def pretend(*requirements: str) -> None:
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: list(requirements))

    return pretend


@pytest.mark.parametrize(
    ("requirement", "level", "problem"),
    [
        ("click>=99", "problem", "labkit is made for >=99"),
        ("no-such-package>=1", "fatal", "labkit needs it"),
        ('no-such-package>=1; extra == "lab"', "problem", "labkit [lab] needs it"),
    ],
)
def test_a_package_that_is_missing_or_out_of_range_is_named_with_its_command(
    requirement: str, level: str, problem: str, requires: Callable[..., None]
) -> None:
    requires(requirement)
    (finding,) = doctor._packages()
    assert (finding.level, finding.problem) == (level, problem)
    assert finding.advice == f"pip install '{requirement.split(';', maxsplit=1)[0]}'"


def test_a_python_outside_the_range_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.14.1")
    assert _one(doctor._system, "Python").level == "fatal"


def test_a_labkit_that_is_not_installed_is_said_once_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISTRIBUTION", "no-such-distribution")
    findings = [*doctor._system(), *doctor._packages()]
    assert [finding.name for finding in findings if finding.problem] == ["labkit"]


def test_a_torch_that_does_not_import_is_fatal_and_quotes_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    finding = _one(doctor._torch, "torch's build")
    assert finding.level == "fatal"
    assert "torch.distributed" in finding.problem


def test_a_torch_without_gloo_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert _one(doctor._torch, "gloo").level == "fatal"


@pytest.mark.parametrize(
    ("cuda_build", "visible", "num_usable", "advice"),
    [
        (None, None, 0, "brings the CUDA build"),
        ("12.8", None, 0, "Install a driver that supports CUDA 12.8"),
        ("12.8", "", 0, ""),
        ("12.8", None, 1, ""),
    ],
    ids=["CPU build", "driver too old", "hidden on purpose", "fine"],
)
def test_gpus_that_torch_cannot_use_are_explained(
    cuda_build: str | None, visible: str | None, num_usable: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: [GPU])
    monkeypatch.setattr(torch.version, "cuda", cuda_build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_usable > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_usable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = _one(doctor._gpus, "GPUs")
    assert finding.level == ("problem" if advice else "ok")
    assert advice in finding.advice
    assert _one(doctor._gpus, "GPU 0").value == "NVIDIA H100 80GB HBM3, 80 GiB, 79 GiB free"


def test_no_gpu_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvidia_gpus", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [finding.level for finding in doctor._gpus()] == ["ok"]


def test_little_shared_memory_is_a_problem_with_the_docker_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr(doctor.os.path, "isdir", lambda path: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    finding = _one(doctor._shared_memory, "shared memory")
    assert finding.level == "problem"
    assert "--shm-size" in finding.advice


@pytest.mark.parametrize(
    ("soft", "hard", "level", "advice"),
    [
        (256, resource.RLIM_INFINITY, "problem", "ulimit -n 4096"),
        (256, 1024, "problem", "ulimit -n 1024"),
        (20000, 20000, "ok", ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", ""),
    ],
)
def test_a_low_limit_of_open_files_is_a_problem_with_the_command(
    soft: int, hard: int, level: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    finding = _one(doctor._open_files, "open files")
    assert finding.level == level
    assert advice in finding.advice


def test_little_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: GIB)
    assert _one(doctor._processor_and_memory, "memory").level == "problem"


def test_a_kernel_in_another_environment_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(
        json.dumps({"argv": ["/usr/bin/env", "-m", "ipykernel"], "display_name": "x", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    finding = _one(doctor._kernel, "kernel python3")
    assert finding.level == "problem"
    assert "ipykernel install --sys-prefix" in finding.advice


def test_a_missing_chromium_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_chromium", lambda: None)
    assert _one(doctor._chromium, "Chromium").level == "problem"


def test_a_look_that_fails_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> Iterator[Finding]:
        raise OSError("no such disk")

    monkeypatch.setattr(doctor, "_shared_memory", explode)
    monkeypatch.setattr(doctor, "_pools", lambda: iter([Finding("pool on cpu", "fine")]))
    findings = doctor.examine()
    assert [finding.problem for finding in findings if finding.name == "explode"] == ["OSError: no such disk"]
    assert findings[-1].name == "pool on cpu"


@pytest.mark.parametrize(
    ("finding", "exit_code"),
    [
        (Finding("x", "1"), 0),
        (Finding("x", "1", "too little", "get more"), 0),
        (Finding("x", "1", "too little", "get more", fatal=True), 1),
    ],
    ids=["ok", "problem", "fatal"],
)
def test_only_a_fatal_finding_fails_the_command(finding: Finding, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    shown = CliRunner().invoke(main, ["doctor"])
    assert shown.exit_code == exit_code
    assert finding.advice in shown.output
    printed = CliRunner().invoke(main, ["doctor", "--json"])
    assert printed.exit_code == exit_code
    assert json.loads(printed.output) == {"usable": exit_code == 0, "findings": [finding.as_dict()]}


def test_the_table_ends_with_the_verdict() -> None:
    console = Console(file=io.StringIO(), width=100)
    doctor.render([Finding("cores", "[2]"), Finding("memory", "1 GiB", "little", "buy some")], console)
    text = console.file.getvalue()
    assert "ok       cores   [2]" in text
    assert "memory: little\n  -> buy some" in text
    assert text.endswith("labkit runs here. 1 problem found.\n")


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("", 8)],
    ids=["none", "1.5", "0.5", "no cgroup"],
)
def test_a_containers_quota_bounds_the_cores(cpu_max: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_max:
        (tmp_path / "cpu.max").write_text(f"{cpu_max}\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.usable_cores() == cores


def test_a_containers_limit_bounds_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{3 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2 * 2**20}\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.available_memory_bytes() == 2**20


NVIDIA_SMI = """#!/bin/sh
echo "0, NVIDIA H100 80GB HBM3, 81559, 80995, 550.54.15"
echo "1, NVIDIA GB10, [N/A], [N/A], 550.54.15"
"""


def test_gpus_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.nvidia_gpus() == [
        machine.Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * 2**20, 80995 * 2**20, "550.54.15"),
        machine.Gpu(1, "NVIDIA GB10", 0, 0, "550.54.15"),
    ]


@pytest.mark.parametrize("program", ["exit 9", "echo No devices were found"], ids=["driver broken", "no devices"])
def test_a_driver_without_gpus_means_none(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.nvidia_gpus() == []


def test_importing_labkit_imports_neither_torch_nor_what_only_figures_need() -> None:
    program = (
        "import sys, labkit; print([name for name in ('torch', 'matplotlib', 'ipywidgets', 'papermill') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


def test_doctor_says_who_can_read_a_kernel_s_outputs() -> None:
    _, finding = doctor._trust()
    assert "every user of this machine can read" in finding.value
    assert PRIVATE in finding.value
