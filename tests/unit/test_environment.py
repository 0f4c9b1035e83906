"""The three files that describe the installation agree: pyproject.toml, environment.yml, the Makefile."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests import scripts

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text())
USER_PACKAGES = {"torch", "jupyterlab", "ipywidgets", "matplotlib", "papermill"}


def _torch() -> SpecifierSet:
    return next(requirement.specifier for requirement in map(Requirement, PROJECT["dependencies"]) if requirement.name == "torch")


def _conda(name: str) -> str:
    (found,) = [spec for spec in CONDA["dependencies"] if isinstance(spec, str) and spec.split()[0] == name]
    return found.removeprefix(name).strip()


def _pip() -> list[str]:
    (section,) = [entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict)]
    return section


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.13.0+cpu", "2.12.0+cu130"])
def test_torch_in_the_supported_range_is_accepted(version: str) -> None:
    assert version in _torch()


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0", "2.14.1", "2.15.0", "3.0.0"])
def test_torch_outside_the_supported_range_is_refused(version: str) -> None:
    assert version not in _torch()


def test_conda_and_pip_take_the_same_python() -> None:
    assert SpecifierSet(_conda("python")) == SpecifierSet(PROJECT["requires-python"])


def test_conda_takes_every_other_package_from_pyproject() -> None:
    # The pip section installs this folder, so packages and ranges are in one place. A second list here would drift.
    assert _pip() == ["-e .[lab]"]
    assert [spec for spec in CONDA["dependencies"] if isinstance(spec, str)] == [f"python {_conda('python')}", "pip"]


def test_conda_uses_the_community_channel_only() -> None:
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]


def test_what_conda_installs_holds_every_package_that_the_notebooks_need() -> None:
    installed = {Requirement(text).name for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["lab"]}
    assert installed >= USER_PACKAGES


@pytest.mark.parametrize("requirement", [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())])
def test_every_requirement_has_a_lower_and_an_upper_bound(requirement: str) -> None:
    operators = {specifier.operator for specifier in Requirement(requirement).specifier}
    assert operators == {">=", "<"}


# Packages that come with a declared one and are its public interface.
COMES_WITH = {
    "nbclient": "papermill",
    "jupyter_client": "ipykernel",
    "jupyter_core": "ipykernel",
    "traitlets": "ipykernel",
    "comm": "ipykernel",
    "PIL": "matplotlib",
    "fontTools": "matplotlib",
    "pygments": "ipython",
    "bs4": "nbconvert",
    "bleach": "nbconvert",
    "tinycss2": "nbconvert",
}
# Optional: GPU benchmarks compare with it if it is installed.
OPTIONAL = {"trl"}


def _imported(*files: Path) -> dict[str, str]:
    """The top-level packages that the files import, with a file that does."""
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0]: file.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found[node.module.split(".")[0]] = file.name
    return {name: file for name, file in found.items() if name not in {*sys.stdlib_module_names, "__main__", "labkit", "tests"}}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [("labkit", ["lab"]), ("tests", ["lab", "dev", "transformers"])],
    ids=["labkit needs no dev extra", "tests"],
)
def test_everything_imported_is_declared(folder: str, extras: list[str]) -> None:
    requirements = PROJECT["dependencies"] + [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
    declared = {canonicalize_name(Requirement(text).name) for text in requirements}
    distributions = importlib.metadata.packages_distributions()
    undeclared = [
        f"{name} (in {file})"
        for name, file in _imported(*(ROOT / folder).rglob("*.py")).items()
        if name not in OPTIONAL
        if not declared & {canonicalize_name(text) for text in [*distributions.get(name, []), COMES_WITH.get(name, name)]}
    ]
    assert undeclared == []


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    commands = re.findall(r"(?:^\s*(?:\$ )?|`)make ([a-z]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"lab", "test"} <= set(commands)
    assert set(commands) <= set(targets)


def test_make_names_the_way_out_when_there_is_no_python(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "install").touch()
    (tmp_path / "pyproject.toml").touch()
    made = subprocess.run(["make", "test", "PYTHON="], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert "No Python 3.11, 3.12 or 3.13 with venv found" in made.stderr
    assert "make PYTHON=" in made.stderr


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The install script as a module whose pip calls are recorded instead of run."""
    module = scripts.load("install")
    module.calls = []
    module.pip = lambda *arguments: module.calls.append(arguments) or 0
    monkeypatch.setattr(module, "_pip_version", lambda: (26, 0))
    return module


CPU_FIRST = ("install", "torch>=2.11,<2.14", "--index-url", "https://download.pytorch.org/whl/cpu")


@pytest.mark.parametrize(
    ("has_gpu", "packages", "takes_cpu_build_first"),
    [
        (False, ["torch", "nvidia-nccl-cu13", "triton"], True),
        (False, ["torch", "sympy"], False),
        (False, [], False),
        (True, ["torch", "nvidia-nccl-cu13", "triton"], False),
    ],
    ids=["no GPU, pip would take CUDA", "no GPU, pip takes the CPU build", "torch is there already", "GPU"],
)
def test_the_cuda_build_comes_only_to_a_machine_with_a_gpu(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, packages: list[str], takes_cpu_build_first: bool
) -> None:
    def dry_run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        report = {"install": [{"metadata": {"name": name}} for name in packages]}
        Path(command[command.index("--report") + 1]).write_text(json.dumps(report))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(install, "_has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.setattr(install.subprocess, "run", dry_run)
    assert install.main() == 0
    everything = ("install", "--editable", f"{ROOT}[lab,dev]")
    assert install.calls == ([CPU_FIRST, everything] if takes_cpu_build_first else [everything])


def test_an_unreachable_cpu_index_stops_the_installation_and_says_what_to_do(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "_has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(install, "_brings_cuda", lambda requirement: True)
    monkeypatch.setattr(install, "pip", lambda *arguments: install.calls.append(arguments) or 1)
    assert install.main() == 1
    assert install.calls == [CPU_FIRST]
    assert "pip install 'torch>=2.11,<2.14'" in capsys.readouterr().err
