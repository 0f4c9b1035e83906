"""The resources of this machine: cores, memory, GPUs, programs. Does not import torch and does not touch a GPU."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as its driver reports it.

    Attributes:
        index: The driver's index, which is torch's too unless CUDA_VISIBLE_DEVICES says otherwise.
        name: The product name.
        memory_bytes: The size of its memory.
        free_bytes: The part of it that is not in use now.
        driver: The driver's version.
    """

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class MemoryAtDeath:
    """A machine's memory when one of its processes was found dead.

    Attributes:
        peak_bytes: The largest resident size of the process; 0 if it was not measured.
        free_bytes: The machine's free memory.
        total_bytes: The machine's memory.
        ran_out: Whether the system killed the process because memory ran out.
    """

    peak_bytes: int
    free_bytes: int
    total_bytes: int
    ran_out: bool = False


def usable_cores() -> int:
    """Return the number of cores this process may use, at least 1: the lesser of its CPU affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # cgroup v2 (Docker, Slurm, Kubernetes) writes "max 100000" without a quota, else "<microseconds> <period>".
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory_bytes() -> int:
    """Return the memory a new program could use now: the lesser of the machine's free memory and its container's allowance."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def nvidia_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that the driver lists, in its order; empty without a working driver. Blocks for at most 20 s."""
    command = find_program("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=index,name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20, stdin=subprocess.DEVNULL, cwd="/")
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for gpu in map(_parse_gpu, listing.stdout.splitlines()) if gpu is not None]


def _parse_gpu(line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 5 or not fields[0].isdigit():
        return None
    # A GPU with unified memory reports "[N/A]" here.
    total, free = (int(field) * 2**20 if field.isdigit() else 0 for field in fields[2:4])
    return Gpu(int(fields[0]), fields[1], total, free, fields[4])


def ends_lines(stream: TextIO) -> bool:
    """Return whether a real terminal, which wraps lines, shows this stream. A notebook's ``!`` only imitates one."""
    return stream.isatty() and "JPY_PARENT_PID" not in os.environ


def find_program(name: str) -> str | None:
    """Return the absolute path of a program; None if there is none. Relative entries of PATH, such as ``.``, are left out."""
    folders = filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep))
    return shutil.which(name, path=os.pathsep.join(folders))


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome, which PDF handouts and browser tests need; None if there is none."""
    for name in _CHROMIUM_NAMES:
        if path := find_program(name):
            return path
    return _MAC_CHROME if os.access(_MAC_CHROME, os.X_OK) else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
