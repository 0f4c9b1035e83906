"""A torch that is newer than those labkit was tried with has to pass the self-test, and a warning says so once."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from pathlib import Path

import pytest

from labkit import doctor
from labkit.base.tried_versions import PYTHON, TORCH, newer_than
from labkit.controller.start import newer_torch
from labkit.errors import WorkerStartError

NEWER = "2.99.0+cpu"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: NEWER if name == "torch" else version(name))
    monkeypatch.setattr(newer_torch, "_passed", False)


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "raise AssertionError('fsdp2, cut backward: gradients stay')"]
    monkeypatch.setattr(newer_torch, "own_python", lambda *arguments: command)


@pytest.mark.parametrize(
    ("version", "newer"),
    [("2.14.1", False), ("2.15.0", False), ("2.15.7+cu140", False), ("2.11.0a0+git1", False), ("2.16.0", True), ("3.0", True)],
)
def test_only_a_minor_version_that_nobody_tried_is_newer(version: str, newer: bool) -> None:
    assert newer_than(("2.11", "2.13", "2.15"), version) == newer


def test_the_versions_here_were_tried() -> None:
    assert not newer_torch.untried()
    assert not newer_than(PYTHON, sys.version.split()[0])


def test_a_newer_torch_passes_the_self_test_and_is_warned_of_once(newer: None, recwarn: pytest.WarningsRecorder) -> None:
    newer_torch.check(lambda: None)
    newer_torch.check(lambda: None)
    (warned,) = recwarn
    assert f"torch {NEWER} is newer than the versions that labkit was tried with ({TORCH[0]} to {TORCH[-1]})" in str(warned.message)
    assert Path(warned.filename) == Path(__file__)


def test_one_that_fails_the_self_test_starts_no_pool(newer: None, fails: None) -> None:
    with pytest.raises(WorkerStartError) as raised:
        newer_torch.check(lambda: None)
    assert "self-test fails" in str(raised.value)
    assert f"pip install 'torch<{newer_torch.first_untried()}'" in str(raised.value)
    assert "cut backward: gradients stay" in str(raised.value)


def test_an_interrupt_ends_the_self_test(newer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newer_torch, "own_python", lambda *arguments: [sys.executable, "-c", "import time; time.sleep(60)"])

    def stop() -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        newer_torch.check(stop)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("version", "found"), [("2.13.0", []), (NEWER, ["fails"])])
def test_doctor_says_which_versions_were_tried_and_tests_a_newer_one(
    version: str, found: list[str], fails: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    findings = {finding.name: finding for finding in doctor._torch()}
    assert f"labkit was tried with {', '.join(TORCH)}" in findings["torch's build"].value
    assert [finding.value for name, finding in findings.items() if name == "self-test on this torch"] == found
    assert all(finding.fatal for finding in findings.values() if finding.problem)
