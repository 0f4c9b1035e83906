"""Fixtures and rules for every test: one private temporary folder, marks by folder, skips with a reason, the leak guard."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tests.start  # noqa: F401  # before the imports that it configures

# isort: split
import nbformat
import pytest
from hypothesis import settings
from nbformat.v4 import new_code_cell, new_notebook

from labkit.base import machine
from tests import leaks
from tests.order import place_of

TESTS = Path(__file__).parent
MakeNotebook = Callable[..., Path]
MARKED_FOLDERS = ("process", "gpu", "browser", "notebooks")

settings.register_profile("labkit", deadline=None, derandomize=True)
settings.load_profile("labkit")


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder, and sort them."""
    for item in items:
        folder = _folder(item)
        if folder in MARKED_FOLDERS and item.get_closest_marker(folder) is None:
            item.add_marker(folder)
    items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide the tests among pytest-xdist's processes as :mod:`tests.together` says."""
    from tests.together import Together  # xdist need not be there where tests run one after the other

    return Together(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say why."""
    if mark := item.get_closest_marker("gpu"):
        needed = mark.args[0] if mark.args else 1
        if (found := len(machine.nvidia_gpus())) < needed:
            pytest.skip(f"needs {needed} NVIDIA GPUs, this machine has {found}")
    if item.get_closest_marker("browser") and machine.find_chromium() is None:
        # Continuous integration installs Chromium, so skipping these tests there would hide a fault.
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Chromium: apt-get install chromium")


@pytest.fixture(scope="session", autouse=True)
def _private_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary folder for this run, so that other runs on this machine do not count as leaks; IPython's files go there too."""
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where people look for it
    # Short: the path of a Unix socket ends at about 100 characters.
    folder = tempfile.mkdtemp(prefix="lk-")
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", folder)
    patch.setenv("IPYTHONDIR", os.path.join(folder, "ipython"))
    patch.setattr(tempfile, "tempdir", None)
    leaks.prepare()
    yield
    patch.undo()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _leak_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Watch tests that start processes; fixtures of a wider scope, such as a shared pool, are set up before this looks."""
    watched = any(request.node.get_closest_marker(name) for name in ("process", "gpu"))
    if not watched:
        yield
        return
    with leaks.guard():
        yield


@pytest.fixture
def make_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeNotebook:
    """Write a notebook with these cells after a parameters cell; the current directory is its folder."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, *cells: str, parameters: str = "size = 1\nlabel = 'none'") -> Path:
        notebook = new_notebook(cells=[new_code_cell(parameters, metadata={"tags": ["parameters"]}), *map(new_code_cell, cells)])
        path = tmp_path / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    return write


@pytest.fixture(autouse=True)
def _verified_means_verified(request: pytest.FixtureRequest) -> Iterator[None]:
    """Verify every result of a migration or reshard in a test: only accepted errors may be found."""
    if "checkpoint" not in request.path.name and "migration" not in request.path.name:
        yield
        return
    from labkit.checkpoint import verify
    from labkit.checkpoint.checks.findings import CURED
    from labkit.checkpoint.convert import engine, migration, resharding

    def run(*args: Any, **options: Any) -> engine.Result:
        result = engine.run(*args, **options)
        errors = {finding.code for finding in verify(result.path).findings if finding.severity == "error"}
        assert errors - CURED <= {finding.code for finding in result.accepted}
        return result

    # Not the test's own monkeypatch: made before a file's fixtures, it would be undone after them, its patches too.
    with pytest.MonkeyPatch.context() as patch:
        for module in (migration, resharding):
            patch.setattr(module, "run", run)
        yield
