"""Whatever a hostile file holds: none of its code runs, no command takes long or much, ends in a traceback or leaves anything."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from labkit.cli import main
from tests.hostile.attacks import ATTACKS, CANARY, MODULE, Hostile
from tests.hostile.corpus import EVERY, PENDING

MOST_S = 10.0
# Beside ten times the file: what a migration of any size takes for its buffers, and the allocator's own rounding.
MOST_BYTES = 96 << 20
ENDS_PROCESSES = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "socket.connect",
    "ctypes.dlopen",
)
# Nothing in labkit itself does these while it reads a checkpoint.
_seen: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in ENDS_PROCESSES:
        _seen.append(f"{event}{arguments}")


sys.addaudithook(_audit)


@contextmanager
def nothing_runs(folder: Path) -> Iterator[None]:
    """Fail when code from a file runs: it starts a process, opens a connection, writes the canary or imports its module."""
    global _seen
    _seen = []
    try:
        yield
        assert _seen == []
        assert not (folder / CANARY).exists()
        assert MODULE not in sys.modules
    finally:
        _seen = None


def peak_bytes() -> int:
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)


@contextmanager
def little_taken(path: Path) -> Iterator[None]:
    """Fail when the block takes more than 10 s of processor time, or ten times the file's bytes."""
    size = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file() and not file.is_symlink())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begun = peak_bytes(), time.process_time()
    yield
    assert time.process_time() - begun < MOST_S
    assert peak_bytes() - before < 10 * size + MOST_BYTES


def everything(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for place, folders, files in os.walk(os.fsencode(folder)):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(place, name))
            found[os.fsdecode(os.path.join(place, name))] = status.st_mode, status.st_size, status.st_mtime_ns
    return found


def commands(path: Path, out: Path) -> list[tuple[str, ...]]:
    """What the victim tries: each reads in another way."""
    return [
        ("show", "--", str(path)),
        ("show", "--opaque", "--json", "--chunks", "--", str(path)),
        ("verify", "--finite", "--", str(path)),
        ("migrate", "--to", "dcp", "--", str(path), str(out)),
        ("reshard", "--ranks", "2", "--", str(path), str(out)),
    ]


@pytest.fixture
def empty_temp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("temp")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def attempt(hostile: Hostile, folder: Path, temp: Path) -> None:
    path = hostile.make(folder)
    out = folder / "out"
    before, threads = everything(folder), threading.active_count()
    for command in commands(path, out):
        with nothing_runs(folder), little_taken(path):
            result = CliRunner().invoke(main, ["checkpoint", *command])
        assert isinstance(result.exception, SystemExit | None), (command[0], result.exc_info)
        assert result.exit_code in (0, 1), (command[0], result.output)
        if hostile.kind.endswith("_calls"):  # torch runs it, whatever is done here
            assert result.exit_code == 1 or "--opaque" in command, (command[0], result.output)
        assert "Traceback" not in result.output
        assert result.output
        if command[0] in ("migrate", "reshard") and result.exit_code == 0:
            for made in (*out.rglob("*"), out):
                made.unlink() if made.is_file() else None
            out.rmdir()
        after = everything(folder)
        assert {name: after.get(name) for name in after | before if after.get(name) != before.get(name)} == {}, command
        assert list(temp.iterdir()) == []
        assert threading.active_count() <= threads


@pytest.mark.parametrize("kind", ATTACKS)
def test_s12_hostile_files_run_nothing_take_little_and_leave_nothing(
    kind: str, tmp_path: Path, empty_temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {}
    for hostile in EVERY:
        if hostile.kind != kind or hostile.name in PENDING:
            continue
        folder = tmp_path / str(hostile.number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        try:
            attempt(hostile, folder, empty_temp)
        except AssertionError as error:
            failed[hostile.name] = str(error)[:600]
    assert failed == {}
