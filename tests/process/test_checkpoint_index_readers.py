"""Processes of their own read a large index: the same result, whatever becomes of them, and none outlives who asked for it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from labkit.checkpoint import open_checkpoint
from labkit.checkpoint.formats.large_index import readers, reading
from tests.benchmarks.checkpoint_index import write_index
from tests.process.patience import ORPHANS_S, process, survivors, until

BLOCK = 1 << 13


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "large"
    write_index(folder, 40, 70)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Three processes read any index, in small blocks, and this process does not. Those that were started."""
    children: list[subprocess.Popen[bytes]] = []
    start = readers._start
    monkeypatch.setattr(reading, "LARGE_BYTES", 0)
    monkeypatch.setattr(readers, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(readers, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(readers, "usable_cores", lambda: 3)

    def noted(*arguments: object) -> subprocess.Popen[bytes]:
        children.append(start(*arguments))  # type: ignore[arg-type]
        return children[-1]

    monkeypatch.setattr(readers, "_start", noted)
    return children


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an item for each reading in this process."""
    begun: list[int] = []
    here = readers.Here

    def noted(file: int) -> readers.Here:
        begun.append(file)
        return here(file)

    monkeypatch.setattr(readers, "Here", noted)
    monkeypatch.setattr(reading, "Here", noted)
    return begun


def read(folder: Path) -> reading.Columns | None:
    with (folder / ".metadata").open("rb") as file:
        return reading.read_large(file, (folder / ".metadata").stat().st_size)


def assert_read_as_in_one_process(folder: Path, found: reading.Columns | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PARALLEL_BYTES", 1 << 60)
        expected = read(folder)
    assert expected is not None
    assert found is not None
    assert found.bounds == expected.bounds
    assert np.array_equal(found.offsets, expected.offsets)
    assert np.array_equal(found.sizes, expected.sizes)
    assert np.array_equal(found.places[:, 1:], expected.places[:, 1:])
    files = [[[*own.files, None][number] for number in own.places[:, 0].tolist()] for own in (found, expected)]
    assert files[0] == files[1]


def test_processes_read_an_index_as_one_process_does(
    index: Path, started: list[subprocess.Popen[bytes]], read_here: list[int]
) -> None:
    found = read(index)
    assert len(started) == 3
    assert not read_here
    assert all(child.returncode is not None for child in started)
    assert_read_as_in_one_process(index, found)


@pytest.mark.parametrize("own_names", [True, False])
def test_texts_that_another_process_has_read_are_found(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], read_here: list[int], own_names: bool
) -> None:
    tensors: dict[str, TensorStorageMetadata] = {}
    places = {}
    for name in ("a.weight", "a.bias", "b.weight"):
        described = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([700_000, 3]), [])
        tensors[name] = described
        text = "".join(list(name))
        for piece in range(700):
            # One text for all places of a tensor, and one file for all: they are in the first block and referred to from all.
            text = "".join(list(name)) if own_names else text
            box = ChunkStorageMetadata(torch.Size([piece * 1000, 0]), torch.Size([1000, 3]))
            described.chunks.append(box)
            places[MetadataIndex(text, torch.Size(box.offsets), piece)] = _StorageInfo("__0_0.distcp", piece * 2**31, 5)
    metadata = Metadata(tensors, {key: ("model", key) for key in tensors}, places)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = read(tmp_path)
    assert len(started) == 3
    assert not read_here
    assert_read_as_in_one_process(tmp_path, found)


def test_an_index_of_another_form_is_none_and_ends_the_processes(index: Path, started: list[subprocess.Popen[bytes]]) -> None:
    data = (index / ".metadata").read_bytes()
    (index / ".metadata").write_bytes(data[: len(data) // 2])
    assert read(index) is None
    assert all(child.returncode is not None for child in started)


def killed(step: str, number: int, patch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]) -> None:
    """Have a process end right before a step of reading."""
    before = getattr(readers.Processes, step)

    def after_the_end(self: readers.Processes, *arguments: object) -> object:
        started[number].kill()
        return before(self, *arguments)

    patch.setattr(readers.Processes, step, after_the_end)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("step", ["_ask", "_replies", "read", "tables", "each"])
def test_an_index_is_read_here_when_a_process_dies(
    index: Path,
    started: list[subprocess.Popen[bytes]],
    read_here: list[int],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    number: int,
) -> None:
    killed(step, number, monkeypatch, started)
    found = read(index)
    assert len(read_here) == 1
    assert all(child.returncode is not None for child in started)
    assert_read_as_in_one_process(index, found)


@pytest.mark.parametrize("program", ["/no/such/python", "/bin/false", "/bin/echo"])
def test_an_index_is_read_here_where_python_cannot_be_started(
    index: Path, started: list[subprocess.Popen[bytes]], read_here: list[int], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    found = read(index)
    assert len(read_here) == 1
    assert_read_as_in_one_process(index, found)


def test_no_module_of_the_working_directory_is_imported(
    index: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (index / "numpy.py").write_text(f"open({str(index / 'ran')!r}, 'w')\nraise SystemExit\n")
    monkeypatch.chdir(index)
    monkeypatch.syspath_prepend("")
    assert read(index) is not None
    assert not (index / "ran").exists()


def test_what_reads_ahead_is_what_reads_then(index: Path, started: list[subprocess.Popen[bytes]], read_here: list[int]) -> None:
    with readers.reading_ahead(index):
        assert len(started) == 3
        assert open_checkpoint(index).num_chunks == 40 * 70
    assert len(started) == 3
    assert not read_here
    with pytest.raises(RuntimeError, match="in between"), readers.reading_ahead(index):
        raise RuntimeError("in between")
    assert len(started) == 6
    assert all(child.returncode is not None for child in started)


def test_an_index_that_is_replaced_meanwhile_is_read_anew(
    index: Path, started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    with readers.reading_ahead(index):
        write_index(tmp_path / "other", 30, 80)
        (tmp_path / "other" / ".metadata").rename(index / ".metadata")
        assert open_checkpoint(index).num_chunks == 30 * 80
    assert len(started) == 6


def test_nothing_reads_ahead_what_is_no_index(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    (tmp_path / "model.pt").write_bytes(b"x" * 1000)
    for path in (tmp_path, tmp_path / "model.pt", tmp_path / "missing"):
        with readers.reading_ahead(path):
            pass
    assert not started


def test_what_starts_the_processes_needs_no_numpy_and_they_need_no_torch() -> None:
    heavy = "print(*({'numpy', 'torch', 'rich', 'psutil'} & sys.modules.keys()))"
    for module, needs in (("readers", {"psutil"}), ("child", set()), ("share", {"numpy"})):
        code = f"import sys, labkit.checkpoint.formats.large_index.{module}\n{heavy}"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert set(done.stdout.split()) == needs, module


# The command, which says which processes read. Those that are stopped keep the others and the command waiting for ever.
SHOW = """
import os, signal, sys
from labkit.checkpoint.formats.large_index import readers, reading
from labkit.cli import main

STOPPED = int(sys.argv.pop())
started = []

def noted(*arguments, start=readers._start):
    started.append(start(*arguments))
    if len(started) <= STOPPED:
        os.kill(started[-1].pid, signal.SIGSTOP)
    return started[-1]

def told(self, replies=readers.Processes._replies):
    print(*(child.pid for child in started), flush=True)
    return replies(self)

readers.Processes._replies = told
readers._start, readers.PARALLEL_BYTES, readers.usable_cores = noted, 0, lambda: 3
reading.LARGE_BYTES = 0
# Started in the background of a script, the tests inherit that SIGINT is ignored, and Python leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


@contextmanager
def showing(folder: Path, *, stopped: int) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process | None]]]:
    """A command that waits for its readers, some of which are stopped, and these."""
    command = [sys.executable, "-c", SHOW, "checkpoint", "show", str(folder), str(stopped)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            children = [process(int(pid)) for pid in run.stdout.readline().split()]
            assert len(survivors(children)) == 3
            yield run, children
        finally:
            run.kill()


@pytest.mark.parametrize("stopped", [1, 3])
def test_the_readers_end_when_the_command_is_killed(index: Path, stopped: int) -> None:
    # The first hands out the first turn: without it the others wait for theirs.
    with showing(index, stopped=stopped) as (run, children):
        run.kill()
        run.communicate(timeout=30)
        until(lambda: len(survivors(children)) == stopped, "readers that are not stopped end", ORPHANS_S)
        for child in survivors(children):
            child.resume()
        until(lambda: not survivors(children), "all readers end", ORPHANS_S)


def test_an_interrupt_ends_the_command_and_its_readers_at_once(index: Path) -> None:
    with showing(index, stopped=3) as (run, children):
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=30)
        assert run.returncode not in (0, None)
        until(lambda: not survivors(children), "all readers end", ORPHANS_S)


def test_an_interrupt_of_the_terminal_leaves_the_readers_to_the_command(
    index: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    with readers.reading_ahead(index):
        assert all(os.getpgid(child.pid) != os.getpgid(0) for child in started)
