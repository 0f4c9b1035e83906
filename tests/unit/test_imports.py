"""Importing labkit is light: no torch, no process, no thread, nothing written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("torch", "numpy", "matplotlib", "pandas", "papermill", "nbformat", "ipywidgets")

_REPORT = """
import json, os, sys, threading
import psutil
before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
{code}
print(json.dumps({{
    "modules": sorted(sys.modules),
    "children": [child.name() for child in psutil.Process().children(recursive=True)],
    "threads": [thread.name for thread in threading.enumerate()],
    "descriptors": (len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0) - before,
    "environ": sorted(os.environ),
    "cwd": os.listdir("."),
}}))
"""


def _after(code: str, folder: Path) -> dict[str, Any]:
    program = [sys.executable, "-c", _REPORT.format(code=code)]
    result = subprocess.run(program, capture_output=True, text=True, timeout=60, cwd=folder, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _after("", tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _after("import labkit", tmp_path_factory.mktemp("imported"))


@pytest.mark.parametrize("name", HEAVY)
def test_import_of_labkit_brings_no_heavy_package(imported: dict[str, Any], name: str) -> None:
    assert name not in imported["modules"]


def test_import_of_labkit_starts_nothing_and_leaves_the_process_as_it_was(bare: dict[str, Any], imported: dict[str, Any]) -> None:
    for name in ("children", "threads", "descriptors", "environ", "cwd"):
        assert imported[name] == bare[name], name


def test_every_public_name_is_there_and_importing_them_brings_no_torch(tmp_path: Path) -> None:
    found = _after("from labkit import *\nimport labkit\nassert all(hasattr(labkit, name) for name in labkit.__all__)", tmp_path)
    assert "torch" not in found["modules"]


def test_a_process_that_reads_notebooks_makes_no_grammars_and_leaves_them_to_whoever_wants_them(tmp_path: Path) -> None:
    code = "from labkit.course.light_nbformat import import_nbformat; import_nbformat(); import nbformat"
    modules = _after(code, tmp_path)["modules"]
    assert "nbformat" in modules
    assert "rfc3987_syntax" not in modules


def test_refused_pool_has_started_nothing(tmp_path: Path) -> None:
    code = """
import labkit
for wrong in (0, -1, True, 1.5, "4", 1000):
    try:
        labkit.WorkerPool(wrong)
    except labkit.LabkitError:
        continue
    raise SystemExit(f"{wrong!r} was taken")
"""
    found = _after(code, tmp_path)
    assert found["children"] == []
    assert found["threads"] == ["MainThread"]
    assert "torch" not in found["modules"]


def test_a_checkpoint_command_imports_what_it_needs_and_no_more(tmp_path: Path) -> None:
    code = """
import contextlib, io, sys
from labkit.cli import main

def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main.main(["checkpoint", *arguments], prog_name="labkit", standalone_mode=False)
    return out.getvalue()

for command in ("show", "verify", "migrate", "reshard"):
    assert "Usage: labkit checkpoint " + command in run(command, "--help")
assert "torch" not in sys.modules
import torch
torch.save({"weight": torch.ones(2)}, "model.pt")
assert "weight" in run("show", "model.pt")
try:
    run("verify", "model.pt")
except SystemExit as end:
    assert end.code == 0
assert "labkit.checkpoint.write.out_files" not in sys.modules
run("migrate", "model.pt", "model.safetensors")
"""
    modules = _after(code, tmp_path)["modules"]
    unneeded = {"torch.distributed.checkpoint", "sympy", "labkit.checkpoint.store.saving", "labkit.controller.pool"}
    assert unneeded.intersection(modules) == set()


def test_a_name_of_labkit_checkpoint_is_the_function_whatever_was_imported_before(tmp_path: Path) -> None:
    code = """
import labkit.checkpoint
assert set(labkit.checkpoint.__all__) <= set(dir(labkit.checkpoint))
import labkit.checkpoint.cli, labkit.checkpoint.checks.verification, labkit.checkpoint.convert.migration
for name in ("show", "verify", "migrate", "reshard", "load", "save"):
    assert callable(getattr(labkit.checkpoint, name)), name
from labkit.checkpoint import *
assert all(hasattr(labkit.checkpoint, name) for name in labkit.checkpoint.__all__)
"""
    _after(code, tmp_path)
