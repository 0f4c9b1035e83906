"""Checkpoint tools against cp, against torch's own converter, and on the index of a very large checkpoint.

Run with ``make bench``. Ratios are taken within one run on one disk; absolute numbers depend on the machine.
LABKIT_BENCH_GIB sets the size (2 by default), LABKIT_BENCH_ROUNDS the timed rounds, LABKIT_BENCH_SMALL the number of small tensors,
LABKIT_BENCH_TENSORS and LABKIT_BENCH_RANKS the size of the large index. NOTES.md lists the attempts that did not help.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from labkit.checkpoint import migrate, reshard
from labkit.checkpoint.cli import RARE_COLLECTIONS
from labkit.checkpoint.index.manifest import hash_file
from tests.benchmarks.checkpoint_index import write_index
from tests.unit.test_checkpoint_many_tensors import MANY, many

GIB = float(os.environ.get("LABKIT_BENCH_GIB", "2"))
ROUNDS = int(os.environ.get("LABKIT_BENCH_ROUNDS", "5"))
SMALL = int(os.environ.get("LABKIT_BENCH_SMALL", "50000"))
TENSORS = int(os.environ.get("LABKIT_BENCH_TENSORS", "1000"))
RANKS = int(os.environ.get("LABKIT_BENCH_RANKS", "1024"))
FIXED_BYTES = 192 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP checkpoint of 32 equal tensors in 4 files."""
    folder = tmp_path_factory.mktemp("source") / "dcp"
    rows = int(GIB * 2**30 / 32 / 4 / 4096)
    state = {f"layers.{index}.weight": torch.randn(rows, 4096) for index in range(32)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=4), no_dist=True)
    return folder


def timed(work: Callable[[], object], produced: Path) -> float:
    """Time a run in seconds, after all earlier writes have reached the disk."""
    if produced.exists():
        shutil.rmtree(produced) if produced.is_dir() else produced.unlink()
    os.sync()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy(source: Path, out: Path) -> None:
    """Copy with cp, which leaves the data in the page cache."""
    subprocess.run(["cp", "-r", str(source), str(out)], check=True)


def copy_to_disk(source: Path, out: Path) -> None:
    """Copy and sync to disk, as migrate and reshard promise."""
    copy(source, out)
    os.sync()


def copy_and_read_back(source: Path, out: Path) -> None:
    """Copy, sync to disk and read back once from there, as migrate and reshard promise."""
    copy_to_disk(source, out)
    for path in out.iterdir():
        hash_file(path, from_disk=True)


@pytest.mark.timeout(1200)
def test_migrate_and_reshard_against_cp(source: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in source.iterdir()) / 2**30
    works: dict[str, Callable[[], object]] = {
        "cp": lambda: copy(source, tmp_path / "out"),
        "cp, sync": lambda: copy_to_disk(source, tmp_path / "out"),
        "cp, sync, read back from the disk": lambda: copy_and_read_back(source, tmp_path / "out"),
        "migrate to dcp": lambda: migrate(source, tmp_path / "out"),
        "migrate to safetensors": lambda: migrate(source, tmp_path / "out", to="safetensors", shard_bytes=1 << 29),
        "migrate to torch.save": lambda: migrate(source, tmp_path / "out", to="torch"),
        "reshard to 8 ranks": lambda: reshard(source, tmp_path / "out", 8),
    }
    took: dict[str, list[float]] = {name: [] for name in works}
    # A shared disk has good and bad minutes, so the ways take turns, and each round gives a ratio.
    for _ in range(ROUNDS):
        for name, work in works.items():
            took[name].append(timed(work, tmp_path / "out"))
    print(f"\n{size:.2f} GiB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds")
    for name, seconds in took.items():
        told = [f"{size / statistics.median(seconds):.2f} GiB/s"]
        for other in ("cp", "cp, sync"):
            ratios = sorted(theirs / ours for theirs, ours in zip(took[other], seconds, strict=True))
            told.append(f"{statistics.median(ratios):.0%} of {other} ({ratios[0]:.0%} to {ratios[-1]:.0%})")
        print(f"{name}: {'; '.join(told)}")


@pytest.mark.timeout(1200)
def test_many_small_tensors(tmp_path: Path) -> None:
    folder = many(tmp_path / "many", SMALL)
    print(f"\n{SMALL:,} tensors of 4 elements, {os.cpu_count()} cores, garbage collection as in the commands")
    gc.set_threshold(*RARE_COLLECTIONS)
    for name, work in MANY.items():
        before = time.process_time()
        took = timed(lambda work=work: work(folder), folder / "out")  # type: ignore[misc]
        used = time.process_time() - before
        print(f"{name}: {took:.1f} s, {used:.1f} s of CPU, load {os.getloadavg()[0]:.1f}")


PEAK = """
from pathlib import Path
import torch.distributed.checkpoint.format_utils
import labkit.checkpoint
def high_water():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
before = high_water()
{work}
print(high_water() - before)
"""


def peak(work: str) -> int:
    """Return the bytes by which code raises a fresh process's peak resident memory above that of its imports.

    From VmHWM: ru_maxrss outlives fork and exec, so a child of a large process starts at its parent's peak.
    """
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", PEAK.format(work=work)], check=True, capture_output=True, text=True)
    return int(ran.stdout.split()[-1])


@pytest.mark.timeout(600)
def test_peak_memory_against_torchs_converter(source: Path, tmp_path: Path) -> None:
    largest = int(GIB * 2**30 / 32)
    theirs = peak(f"torch.distributed.checkpoint.format_utils.dcp_to_torch_save({str(source)!r}, {str(tmp_path / 'theirs.pt')!r})")
    (tmp_path / "theirs.pt").unlink()
    ours = {
        "migrate to torch.save": peak(f"labkit.checkpoint.migrate({str(source)!r}, {str(tmp_path / 'ours.pt')!r})"),
        "migrate to safetensors": peak(f"labkit.checkpoint.migrate({str(source)!r}, {str(tmp_path / 'ours.safetensors')!r})"),
        "reshard to 8 ranks": peak(f"labkit.checkpoint.reshard({str(source)!r}, {str(tmp_path / 'ours')!r}, 8)"),
    }
    print(f"\nlargest tensor {largest / 2**20:.0f} MiB; dcp_to_torch_save {theirs / 2**20:,.0f} MiB")
    # Check the measurement itself: it has to see that torch holds the whole checkpoint.
    assert theirs > 0.8 * GIB * 2**30
    for name, used in ours.items():
        assert used > 0, name
        print(f"{name}: {used / 2**20:,.0f} MiB")
        assert used < 2 * largest + FIXED_BYTES, name


def peak_with_children(run: psutil.Popen) -> float:
    """The most memory that a process and its children take together until it ends, in GiB; shared pages count once."""
    most = 0
    while run.poll() is None:
        used = 0
        for process in [run, *run.children()]:
            with contextlib.suppress(psutil.Error):
                used += process.memory_full_info().pss
        most = max(most, used)
        time.sleep(0.1)
    return most / 2**30


@pytest.mark.timeout(1200)
def test_show_on_a_very_large_index(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    size = write_index(folder, TENSORS, RANKS)
    # Otherwise this would mostly measure how show reports a thousand missing files.
    for rank in range(RANKS):
        (folder / f"__{rank}_0.distcp").touch()
    print(f"\n{TENSORS:,} tensors x {RANKS:,} ranks: .metadata of {size / 2**20:,.0f} MiB, {os.cpu_count()} cores")
    for _ in range(ROUNDS):
        before, began = os.times(), time.perf_counter()
        with (tmp_path / "shown").open("wb") as shown:
            run = psutil.Popen([sys.executable, "-m", "labkit", "checkpoint", "show", str(folder)], stdout=shown)
            memory = peak_with_children(run)
        took, after = time.perf_counter() - began, os.times()
        output = (tmp_path / "shown").read_text()
        assert run.returncode == 0, output
        used = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"{took:.1f} s, {used:.1f} s of CPU, {memory:.2f} GiB, load {os.getloadavg()[0]:.1f}")
    assert f"{TENSORS * RANKS:,} chunks" in output
