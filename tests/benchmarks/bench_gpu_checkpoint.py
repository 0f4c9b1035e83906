"""The time for which a checkpoint stops training on a GPU, and the rate at which it reaches the disk, compared with ``cp``.

``LABKIT_BENCH_GIB`` sets the size of the state, 10 by default, over all ranks together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.bench_gpu_fsdp import timed_on_disk
from tests.benchmarks.bench_gpu_pool import torchrun
from tests.benchmarks.gpu_stall import BACKGROUND
from tests.benchmarks.gpu_steps import NUM_RANKS, REHEARSAL
from tests.benchmarks.table import Figures, show_seconds

pytestmark = [pytest.mark.timeout(550), *([] if REHEARSAL else [pytest.mark.gpu(1)])]

GIB = float(os.environ.get("LABKIT_BENCH_GIB", "0.05" if REHEARSAL else "10"))
WAYS = ("dcp", "dcp_thread", "dcp_process", "dcp_pinned", "labkit", "labkit_async")


@pytest.fixture(scope="module")
def figures() -> Iterator[Figures]:
    gathered = Figures(f"GPU-checkpoint (a state of {GIB:g} GiB, {NUM_RANKS} ranks)")
    yield gathered
    gathered.finish()


def test_seconds_that_training_stands_still(figures: Figures, tmp_path: Path) -> None:
    torch.save(torch.randn(int(GIB * 2**28)), tmp_path / "state.pt")
    copy_s = timed_on_disk(["cp", str(tmp_path / "state.pt"), str(tmp_path / "copy.pt")])
    for name in ("state.pt", "copy.pt"):
        (tmp_path / name).unlink()
    figures.add("cp, on disk", f"{GIB * 1.0737 / copy_s:.2f} GB/s", show_seconds(copy_s))
    saves: dict[tuple[str, str], dict[str, Any]] = {}
    for line in torchrun("gpu_stall.py", str(tmp_path), str(GIB), *WAYS):
        if (found := re.search(r"\{.*\}", line)) is None:
            continue
        one = json.loads(found[0])
        way, turn = one["way"], one["turn"]
        saves[way, turn] = one
        if error := one.get("error"):
            figures.add(f"{way}, {turn}", "failed", error[:300])
            continue
        rate = (
            f"{GIB * 1.0737 / one['save_s']:.2f} GB/s, saved in {one['save_s']:.1f} s; the call took {show_seconds(one['call_s'])}"
        )
        figures.add(f"{way}, {turn}: training stands still", show_seconds(one["stall_s"]), rate)
    synchronous_s = saves["dcp", "only"]["save_s"]
    for way in BACKGROUND:
        if stall_s := saves[way, "second"].get("stall_s"):
            figures.add(f"{way}, second: of dcp.save", f"{stall_s / synchronous_s:.1%}", aim="under 3 %")
