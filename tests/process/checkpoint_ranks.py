"""Plain ranks for checkpoint tests: forked from a template process that has imported torch, gloo over a file store, killable.

The template (this file run as a program) never runs an operation of torch itself, so its forks are as good as new.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
_IMPORTS = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "tests.process.checkpoint_models",
)


class RankError(AssertionError):
    """A rank raised, died or did not answer in time."""


class Ranks:
    """Running ranks. Results arrive as files in ``folder``."""

    def __init__(self, pids: list[int], folder: Path) -> None:
        self.pids, self.folder = pids, folder

    def results(self, timeout_s: float = 60.0) -> list[Any]:
        """Return every rank's result in rank order, or raise RankError with the traceback of the first that raised."""
        deadline = time.monotonic() + timeout_s
        try:
            outcomes = [self._outcome(rank, deadline) for rank in range(len(self.pids))]
        finally:
            self.kill()
        for rank, (ok, payload) in enumerate(outcomes):
            if not ok:
                raise RankError(f"rank {rank}:\n{payload}")
        return [payload for _, payload in outcomes]

    def _outcome(self, rank: int, deadline: float) -> tuple[bool, Any]:
        path = self.folder / f"result_{rank}"
        while not path.exists():
            if not psutil.pid_exists(self.pids[rank]) and not path.exists():
                return False, "died"
            if time.monotonic() > deadline:
                return False, "did not answer in time"
            time.sleep(0.002)
        return pickle.loads(path.read_bytes())  # type: ignore[no-any-return]

    def alive(self) -> bool:
        return any(psutil.pid_exists(pid) for pid in self.pids)

    def kill(self) -> None:
        """Kill the ranks that still run with SIGKILL, and wait until they are gone."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        deadline = time.monotonic() + 10
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.002)


class Launcher:
    """Talks to the template process."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
        }
        self._template = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
        )
        self._count = 0
        assert self._template.stdout is not None
        assert self._template.stdout.read(1) == b"r"

    def start(self, function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> Ranks:
        """Run ``function(rank, *args)`` on fresh ranks with a gloo group, without waiting."""
        assert self._template.stdin is not None
        assert self._template.stdout is not None
        self._count += 1
        place = folder / f"ranks_{self._count}"
        place.mkdir(parents=True)
        pids = []
        for rank in range(world_size):
            _send(self._template.stdin, (function.__module__, function.__qualname__, rank, world_size, str(place), args))
            pids.append(struct.unpack("<q", self._template.stdout.read(8))[0])
        return Ranks(pids, place)

    def run(self, function: Callable[..., Any], world_size: int, folder: Path, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run ``function(rank, *args)`` on fresh ranks; their results in rank order."""
        return self.start(function, world_size, folder, *args).results(timeout_s)


@functools.cache
def _shared() -> Launcher:
    # One template for all modules that import the fixture; it ends with this process, at the end of its input.
    return Launcher()


@pytest.fixture(scope="session", name="launcher")
def launcher_fixture() -> Launcher:
    """The template process."""
    return _shared()


def _send(file: BinaryIO, message: Any) -> None:
    data = pickle.dumps(message)
    file.write(struct.pack("<q", len(data)) + data)
    file.flush()


def _child(module: str, name: str, rank: int, world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
        payload = True, getattr(importlib.import_module(module), name)(rank, *args)
    except BaseException:
        payload = False, traceback.format_exc()
    temporary = Path(folder, f".result_{rank}")
    temporary.write_bytes(pickle.dumps(payload))
    temporary.rename(Path(folder, f"result_{rank}"))
    # Peers may still be reading from this rank's sockets; they all end here, or are killed.
    if dist.is_initialized() and payload[0]:
        dist.barrier()
    os._exit(0)


def _template() -> None:
    # Import here what every rank of every test would otherwise import itself: an optimizer's first step alone imports dynamo.
    for module in _IMPORTS:
        importlib.import_module(module)
    import labkit.checkpoint

    for _, module, _ in pkgutil.iter_modules(labkit.checkpoint.__path__, "labkit.checkpoint."):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    replies.write(b"r")
    while header := requests.read(8):
        message = pickle.loads(requests.read(struct.unpack("<q", header)[0]))
        gc.freeze()  # otherwise a rank's first garbage collection copies every page of torch's objects
        pid = os.fork()
        if pid == 0:
            replies.close()
            _child(*message)
        replies.write(struct.pack("<q", pid))


if __name__ == "__main__":
    _template()
