"""What is known of memory when a rank has been killed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
_GIB = 2**30


def oom_kills() -> int:
    """How often Linux has killed a process for want of memory, in this control group and on this machine; 0 elsewhere."""
    total = 0
    for path in _COUNTERS:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    total += int(value)
    return total


def describe(peak_bytes: int) -> str:
    """The dead process's peak and the machine's memory now, as half a sentence; the peak is left out where unknown."""
    memory = psutil.virtual_memory()
    peak = f"its memory had reached {peak_bytes / _GIB:.2f} GiB, and " if peak_bytes else ""
    return f"{peak}{memory.available / _GIB:.1f} of the machine's {memory.total / _GIB:.1f} GiB are free now"
