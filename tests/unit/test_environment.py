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
from collections.abc import Callable
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


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.13.0+cpu", "2.12.0+cu130", "2.14.1", "2.15.0", "3.0.0"])
def test_torch_in_the_supported_range_is_accepted(version: str) -> None:
    assert version in _torch()


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0"])
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
    # A torch above those that were tried has to pass a self-test instead (labkit/controller/start/newer_torch.py).
    assert operators == ({">="} if Requirement(requirement).name == "torch" else {">=", "<"})


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
    assert "No Python 3.11 to 3.14 with venv found" in made.stderr
    assert "make PYTHON=" in made.stderr


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The install script as a module whose pip calls are recorded instead of run."""
    module = scripts.load("install")
    module.calls = []
    module.pip = lambda *arguments: module.calls.append(arguments) or 0
    monkeypatch.setattr(module, "_pip_version", lambda: (26, 0))
    return module


TORCH = "torch>=2.11"
EVERYTHING = ("--editable", f"{ROOT}[lab,dev]")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA = ["torch", "nvidia-nccl-cu13", "triton"]
SEEN = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.14.1+cpu, 2.13.0+cpu, 2.13.0, 2.10.0+cpu\n  LATEST: 2.15.0\n"
NONE_SEEN = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1\n"


@pytest.fixture
def pip_says(install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Pretend what pip would install by its own choice, each a file of 1 GB, and which versions it sees."""

    def pretend(packages: list[str], own: str = "", at_index: str = "") -> None:
        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            if "--report" in command:
                report = {"install": [{"metadata": {"name": name}, "download_info": {"url": name}} for name in packages]}
                Path(command[command.index("--report") + 1]).write_text(json.dumps(report))
            return subprocess.CompletedProcess(command, 0, stdout=at_index if CPU_INDEX in command else own)

        monkeypatch.setattr(install.subprocess, "run", run)
        monkeypatch.setattr(install, "_size", lambda url: 10**9)
        monkeypatch.setattr(install, "_has_nvidia_gpu", lambda: False)

    return pretend


@pytest.mark.parametrize(
    ("wanted", "own", "at_index", "build", "places"),
    [
        ("", SEEN, "", "2.14.1+cpu", []),
        ("torch==2.13.*", SEEN, "", "2.13.0+cpu", []),
        ("", NONE_SEEN, SEEN, "2.14.1+cpu", ["--extra-index-url", CPU_INDEX]),
        ("torch==2.15.0", SEEN, SEEN, "", []),
        ("", NONE_SEEN, NONE_SEEN, "", []),
        ("", "", "", "", []),
    ],
    ids=["the newest", "the one that fits", "at the index", "none fits", "none", "pip does not say"],
)
def test_without_a_gpu_the_newest_cpu_build_that_fits_comes_first(
    install: ModuleType,
    pip_says: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    wanted: str,
    own: str,
    at_index: str,
    build: str,
    places: list[str],
) -> None:
    pip_says(CUDA, own, at_index)
    assert install.main(wanted) == 0
    last = ("install", wanted or TORCH, *EVERYTHING)
    assert install.calls == ([("install", f"torch=={build}", *places), last] if build else [last])
    assert ("3.0 GB to download" in capsys.readouterr().out) == (not build)


@pytest.mark.parametrize(
    ("has_gpu", "packages"),
    [(False, ["torch", "sympy"]), (False, []), (True, CUDA)],
    ids=["no GPU, pip takes the CPU build", "torch is there already", "GPU"],
)
def test_elsewhere_pip_chooses(
    install: ModuleType, pip_says: Callable[..., None], monkeypatch: pytest.MonkeyPatch, has_gpu: bool, packages: list[str]
) -> None:
    pip_says(packages, SEEN)
    monkeypatch.setattr(install, "_has_nvidia_gpu", lambda: has_gpu)
    assert install.main() == 0
    assert install.calls == [("install", TORCH, *EVERYTHING)]


def test_a_cpu_build_that_pip_cannot_install_ends_the_installation(
    install: ModuleType, pip_says: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_says(CUDA, SEEN)
    monkeypatch.setattr(install, "pip", lambda *arguments: install.calls.append(arguments) or 1)
    assert install.main() == 1
    assert len(install.calls) == 1


def test_what_pip_would_fetch_is_weighed(install: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "one.whl").write_bytes(b"x" * 1000)
    url = (tmp_path / "one.whl").as_uri()
    assert install._size(url) == 1000
    assert install._size((tmp_path / "other.whl").as_uri()) is None
    assert install._weight([url, (tmp_path / "other.whl").as_uri()]) == "more than 0.0 GB"
    assert install._weight([]) == "several GB"


@pytest.mark.parametrize(
    ("before", "torch", "installs"),
    [
        ("torch==2.14.1", "torch==2.15.0", True),
        ("torch==2.15.0", "torch==2.15.0", False),
        ("torch==2.15.0", "", False),
        ("", "torch>=2.14,<2.15", True),
    ],
)
def test_make_installs_again_for_another_torch(tmp_path: Path, before: str, torch: str, installs: bool) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in (".ci/install", "pyproject.toml", ".venv/.torch", ".venv/.installed"):
        (tmp_path / name).write_text(before)
    command = ["make", "-n", "test", "PYTHON=python3", *([f"TORCH={torch}"] if torch else [])]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert (f".ci/install '{torch}'" in said) == installs
