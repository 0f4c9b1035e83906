"""torchrun's script for the checkpoint benchmark: train, save in one way, train on, and print how long training was stopped.

Usage: ``torchrun gpu_stall.py FOLDER GIB WAY...``. One line of JSON for each save.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import labkit.checkpoint
from tests.benchmarks.gpu_steps import DEVICE, REHEARSAL, synchronize

COLUMNS = 4096
#: In this many tensors, as large as those of a model with a width of 4,096.
NUM_TENSORS = 160
THREADS = 4
BACKGROUND = ("dcp_thread", "dcp_process", "dcp_pinned", "labkit_async")


class Pending(NamedTuple):
    """A running save: functions to call before the state may change, to see whether it has ended, and to get its error."""

    may_change: Callable[[], Any]
    done: Callable[[], bool]
    result: Callable[[], Any]


def nothing() -> None:
    """Return at once, because a copy has already been made."""


class Training:
    """A state on the device, and a step of about 60 ms that changes all of it."""

    def __init__(self, gib: float) -> None:
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        rows = int(gib * 2**30 / NUM_TENSORS / COLUMNS / 4) // dist.get_world_size()
        locals_ = [torch.randn(rows, COLUMNS, device=DEVICE) for _ in range(NUM_TENSORS)]
        self.tensors = locals_
        self.state = {"model": {f"layers.{i}.weight": DTensor.from_local(one, mesh, [Shard(0)]) for i, one in enumerate(locals_)}}
        self.factors = [
            torch.randn((256, 256) if REHEARSAL else (8192, 8192), device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
        ]
        self.step_s = 0.0
        for _ in range(3):
            self.step()
        began_s = time.perf_counter()
        for _ in range(20):
            self.step()
        self.step_s = (time.perf_counter() - began_s) / 20

    def step(self, may_change: Callable[[], Any] = nothing) -> None:
        """Compute, and change the state as soon as that is allowed."""
        for _ in range(40):
            torch.mm(*self.factors)
        may_change()
        torch._foreach_mul_(self.tensors, 1.0)
        synchronize()


def writer(folder: Path) -> dcp.FileSystemWriter:
    """torch's own, with as many threads as labkit gets."""
    return dcp.FileSystemWriter(folder, thread_count=THREADS)


class Ways:
    """Every way to save. Those that keep host memory between saves keep it here."""

    def __init__(self, training: Training) -> None:
        self.state: Any = training.state
        pinned = DEVICE == "cuda"
        self.stager = DefaultStager(StagingOptions(pinned, False, True, pinned))
        self.steps = 0

    def dcp(self, folder: Path) -> Pending | None:
        """``dcp.save``."""
        dcp.save(self.state, storage_writer=writer(folder))
        return None

    def dcp_thread(self, folder: Path) -> Pending:
        """``dcp.async_save``: copies to ordinary host memory, then writes from a thread."""
        future = dcp.async_save(self.state, storage_writer=writer(folder))
        return Pending(nothing, future.done, future.result)

    def dcp_process(self, folder: Path) -> Pending:
        """``dcp.async_save`` that writes from a process."""
        future = dcp.async_save(self.state, storage_writer=writer(folder), async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        return Pending(nothing, future.done, future.result)

    def dcp_pinned(self, folder: Path) -> Pending:
        """``dcp.async_save`` with a stager that copies to pinned memory on a stream of its own, while the step computes."""
        response = dcp.async_save(self.state, storage_writer=writer(folder), async_stager=self.stager)
        return Pending(response.staging_completion.result, response.upload_completion.done, response.upload_completion.result)

    def labkit(self, folder: Path) -> Pending | None:
        """``labkit.checkpoint.save``, which hashes and reads back what it wrote."""
        labkit.checkpoint.save(folder, self.state, 1, threads=THREADS)
        return None

    def labkit_async(self, folder: Path) -> Pending:
        """``labkit.checkpoint.save_async``."""
        pending = labkit.checkpoint.save_async(folder, self.state, 1, threads=THREADS)
        return Pending(nothing, pending.done, pending.wait)


def measure(training: Training, save: Callable[[Path], Pending | None], folder: Path) -> dict[str, float]:
    """Save once while training goes on.

    Returns:
        ``call_s`` until the call returned, ``stall_s`` that training lost in all until the save had ended, and ``save_s``
        from the call to the end of the save.
    """
    synchronize()
    dist.barrier()
    began_s = time.perf_counter()
    pending = save(folder)
    call_s = time.perf_counter() - began_s
    if pending is None:
        return {"call_s": call_s, "stall_s": call_s, "save_s": call_s}
    num_steps = 0
    while not pending.done():
        training.step(pending.may_change)
        num_steps += 1
    save_s = time.perf_counter() - began_s
    pending.result()
    return {"call_s": call_s, "stall_s": save_s - num_steps * training.step_s, "save_s": save_s}


def main(folder: Path, gib: float, names: list[str]) -> None:
    """Run the background ways twice: their first save also prepares memory and processes."""
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    training = Training(gib)
    ways = Ways(training)
    for name in names:
        for turn in ("first", "second") if name in BACKGROUND else ("only",):
            target = folder / f"{name}-{turn}"
            line: dict[str, Any] = {"way": name, "turn": turn, "step_s": training.step_s}
            try:
                line |= measure(training, getattr(ways, name), target)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {error}"
            dist.barrier()
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)
                shutil.rmtree(target, ignore_errors=True)
    ways.stager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
