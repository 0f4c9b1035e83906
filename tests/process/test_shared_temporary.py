"""Pools start in no temporary folder in which others could exchange the folder with their sockets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit import WorkerPool
from labkit.base.places import PlaceError
from labkit.controller.machines.agents import LocalAgents
from labkit.errors import WorkerStartError


@pytest.fixture
def shared() -> Iterator[str]:
    """A group's folder, in which everybody may rename what others have made."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # short, as sockets need it
        Path(folder).chmod(0o777)
        yield folder


@pytest.mark.parametrize("launcher", ["local", "agents"])
def test_v2_a_pool_is_refused_with_the_next_step(launcher: Any, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", shared)
    with pytest.raises(PlaceError, match=r"can be changed by other users.* Set TMPDIR to a folder that only you can write to"):
        WorkerPool(1, "cpu", launcher=launcher)
    assert os.listdir(shared) == []


def test_v2_a_machine_of_an_attached_pool_says_why_it_takes_no_part(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = LocalAgents._start
    monkeypatch.setattr(LocalAgents, "_start", lambda agents, command, environ: start(agents, command, {"TMPDIR": shared}))
    with pytest.raises(
        WorkerStartError, match=r"can be changed by other users.* Set TMPDIR to a folder that only you can write to"
    ):
        WorkerPool(1, "cpu", launcher="agents", start_timeout_s=60)
    assert os.listdir(shared) == []
