"""FSDP2 beside FSDP1 on a decoder of one billion parameters: step, peak memory, and the way from a checkpoint to the other.

As many ranks as there are GPUs, at most four. With one rank neither communicates, and FSDP1 does not shard.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from tests.benchmarks.gpu_fsdp import differing, kernel_times, memory_left, remove, save_fsdp1, train
from tests.benchmarks.gpu_steps import DEVICE, NUM_RANKS, REHEARSAL
from tests.benchmarks.table import Figures, show_seconds

pytestmark = [pytest.mark.timeout(400), *([] if REHEARSAL else [pytest.mark.gpu(1)])]

MIGRATE = """
import time
from pathlib import Path
import labkit.checkpoint
def high_water():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
before, began_s = high_water(), time.perf_counter()
labkit.checkpoint.migrate({source!r}, {target!r})
print(time.perf_counter() - began_s, high_water() - before)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(NUM_RANKS, device=DEVICE, replace=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def figures() -> Iterator[Figures]:
    gathered = Figures(f"GPU-FSDP (one billion parameters, 4 x 2048 tokens a rank, {NUM_RANKS} ranks)")
    yield gathered
    gathered.finish()


def test_step_and_peak(pool: labkit.WorkerPool, figures: Figures) -> None:
    found = {}
    for engine in ("FSDP1", "FSDP2"):
        pool.restart()
        (timed, count), *_ = sorted(pool.run(train, engine, timeout_s=200).values(), key=lambda one: -one[0].step_s)
        found[engine] = timed
        left = max(pool.run(memory_left).values())
        parts = f"forward {1000 * timed.forward_s:.1f}, backward {1000 * timed.backward_s:.1f}; loss {timed.loss:.4f}"
        figures.add(f"{engine}: step of {count / 1e9:.2f} billion parameters", f"{1000 * timed.step_s:.1f} ms", parts)
        peaks = (
            f"before the optimizer's step {timed.backward_peak_bytes / 2**30:.2f}; left when the model is gone {left / 2**30:.2f}"
        )
        figures.add(f"{engine}: peak", f"{timed.peak_bytes / 2**30:.2f} GiB", peaks)
    step = found["FSDP2"].step_s / found["FSDP1"].step_s - 1
    peak = found["FSDP2"].peak_bytes / max(1, found["FSDP1"].peak_bytes) - 1
    figures.add("FSDP2 over FSDP1", f"step {step:+.1%}, peak {peak:+.1%}")
    assert found["FSDP2"].loss == pytest.approx(found["FSDP1"].loss, rel=0.01)


@pytest.mark.skipif(REHEARSAL, reason="a CPU has no kernels on a device")
def test_where_the_difference_is(pool: labkit.WorkerPool, figures: Figures) -> None:
    found = {}
    for engine in ("FSDP1", "FSDP2"):
        pool.restart()
        found[engine] = pool.run(kernel_times, engine, timeout_s=200)[0]
    for kind, (ms, count) in found["FSDP2"].items():
        before_ms, before = found["FSDP1"][kind]
        figures.add(f"kernels of a step: {kind}", f"FSDP2 {ms:.2f} ms in {count:.0f}", f"FSDP1 {before_ms:.2f} ms in {before:.0f}")
    assert found["FSDP2"]["matrix products"][0] > 0


def test_migration(pool: labkit.WorkerPool, figures: Figures, tmp_path: Path) -> None:
    source, target = tmp_path / "fsdp1.pt", tmp_path / "migrated"
    pool.run(save_fsdp1, str(source), timeout_s=300)
    size = source.stat().st_size
    copy_s = timed_on_disk(["cp", str(source), str(tmp_path / "copy")])
    remove(tmp_path / "copy")
    figures.add("cp of FSDP1's file, on disk", f"{size / copy_s / 1e9:.2f} GB/s", f"{size / 1e9:.1f} GB in {show_seconds(copy_s)}")
    code = MIGRATE.format(source=str(source), target=str(target))
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    took_s, used = map(float, ran.stdout.split()[-2:])
    against = f"{copy_s / took_s:.0%} of cp; memory above its imports {used / 2**20:,.0f} MiB"
    figures.add("migrate to FSDP2, verified", f"{size / took_s / 1e9:.2f} GB/s", against)
    assert pool.run(differing, str(target), str(source), timeout_s=200)[0] == []
    remove(target)
    remove(source)


def timed_on_disk(command: list[str]) -> float:
    """Return the seconds until a command's output is on disk."""
    os.sync()
    began_s = time.perf_counter()
    subprocess.run(command, check=True)
    os.sync()
    return time.perf_counter() - began_s
