"""No hostile file runs code, and no command on one takes much time or memory, ends in a traceback or leaves files behind."""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from labkit.cli import main
from tests.hostile.attacks import ATTACKS, CANARY, MODULE, Hostile, sound_dcp, sound_safetensors
from tests.hostile.corpus import EVERY, PENDING
from tests.hostile.pickles import named, pickled, text
from tests.matrix import matrix

MOST_S = 10.0
# Memory allowed beyond ten times the file: a migration's buffers, and the allocator's rounding.
MOST_BYTES = 96 << 20
STARTS = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "socket.connect",
    "ctypes.dlopen",
)
_seen: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in STARTS:
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
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
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
    """The victim's commands, each of which reads in another way."""
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
        if hostile.kind.endswith("_calls"):  # torch itself would run it
            assert result.exit_code == 1 or command[0] == "show", (command[0], result.output)
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


def test_there_are_300_hostile_files_and_each_is_made_again_by_its_name(tmp_path: Path) -> None:
    assert len({hostile.name for hostile in EVERY}) >= 300
    assert set(PENDING) <= {hostile.name for hostile in EVERY}
    for hostile in EVERY[::50]:
        made = []
        for again in "ab":
            folder = tmp_path / hostile.name / again
            folder.mkdir(parents=True)
            hostile.make(folder)
            made.append([status[:2] for status in everything(folder).values()])
        assert made[0] == made[1]


def test_the_sound_ones_pass_every_command_of_this_test(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(sound_safetensors())
    torch.save({"model": {"a": torch.ones(2)}, "epoch": 1}, tmp_path / "x.pt")
    for number, path in enumerate((sound_dcp(tmp_path / "d"), tmp_path / "x.pt", tmp_path / "x.safetensors")):
        for command in commands(path, tmp_path / f"out{number}")[: 3 if path.is_dir() else 4]:
            with nothing_runs(tmp_path), little_taken(path):
                result = CliRunner().invoke(main, ["checkpoint", *command])
            assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("module", "name"), [("os", "system"), ("builtins", "__import__")])
def test_the_watch_sees_code_that_runs(tmp_path: Path, module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{MODULE}.py").write_text(f"open({str(tmp_path / CANARY)!r}, 'w').close()")
    argument = MODULE if name == "__import__" else "true"
    with pytest.raises(AssertionError), nothing_runs(tmp_path):
        pickle.loads(pickled(named(module, name, Random(1)) + b"(" + text(argument) + b"tR"))
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize("name", matrix("pickle_that_grows-3", "pickle_that_calls-0", "no_regular_file-2"))
def test_s12_a_process_with_little_memory_and_time_withstands_them_too(name: str, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # torch's libraries alone take 4
        resource.setrlimit(resource.RLIMIT_CPU, (40, 40))

    hostile = next(hostile for hostile in EVERY if hostile.name == name)
    path, out = hostile.make(tmp_path), tmp_path / "out"
    before = everything(tmp_path)
    for command in commands(path, out)[2:4]:
        program = [sys.executable, "-P", "-m", "labkit", "checkpoint", *command]
        done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, preexec_fn=limit, timeout=100, check=False)
        assert done.returncode == 1, (command, done)
        assert "Traceback" not in done.stderr
    assert everything(tmp_path) == before


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
