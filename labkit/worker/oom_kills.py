"""Whether Linux killed a rank because memory ran out, from what the kernel counts for each control group.

A rank that died by SIGKILL was killed for want of memory if both hold, and else "from outside":

* the kernel's counter of such kills in the rank's own control group rose in the last FRESH_S; each rise accounts for one rank;
* the rank had at its largest at least half of what its group could use a moment after its death: the kernel kills a large
  process, and its end frees that much.

So a rank that somebody kills while the kernel kills another process of its group is not blamed on memory. Several ranks that are
killed together may not be either, because each then had less than half of what they have freed together.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from labkit.machine import MemoryAtDeath

# A process of hundreds of gigabytes takes seconds to end once it has been killed.
FRESH_S = 10.0
_ROOT = Path("/sys/fs/cgroup")


class OomKills:
    """Watches the control groups of a machine's ranks."""

    def __init__(self) -> None:
        self._groups: dict[int, Path] = {}
        self._counts: dict[Path, int] = {}
        self._rises: dict[Path, list[float]] = defaultdict(list)

    def look(self, living: Iterable[int]) -> None:
        """Note the group of each living rank, by process id, and what the kernel counts there now."""
        for pid in living:
            if (group := _memory_group(pid)) is not None:
                self._groups[pid] = group
        for group in set(self._groups.values()):
            count = _oom_kills(group)
            self._rises[group] += [time.monotonic()] * (count - self._counts.get(group, count))
            self._counts[group] = count

    def at_death(self, pid: int, peak_bytes: int, *, by_sigkill: bool) -> MemoryAtDeath:
        """Say what memory was like when a rank was found dead, and whether it was killed for want of it."""
        memory = psutil.virtual_memory()
        group = self._groups.get(pid)
        free = min([int(memory.available), *(_room(group) if group is not None else ())])
        self.look(())
        self._groups.pop(pid, None)
        ran_out = False
        if by_sigkill and group is not None and peak_bytes >= free / 2:
            rises = [moment for moment in self._rises[group] if time.monotonic() - moment <= FRESH_S]
            ran_out, self._rises[group] = bool(rises), rises[1:]
        return MemoryAtDeath(peak_bytes, int(memory.available), int(memory.total), ran_out)


def _memory_group(pid: int) -> Path | None:
    """The folder of the control group that accounts for a process's memory; None where there is none, and for one that is dying."""
    try:
        lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        # A process that ends gives up its memory first, and then counts as one of the outermost group (in version 1).
        if Path(f"/proc/{pid}/statm").read_text().startswith("0 "):
            return None
    except OSError:
        return None
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/")
    return next((_ROOT / path.lstrip("/") for _, controllers, path in lines if not controllers), None)


def _oom_kills(group: Path) -> int:
    """Return the number of processes of the group that Linux has killed for want of memory; 0 where it does not say."""
    # Version 2 of control groups, version 1, and for all processes of the machine where the group is the outermost of version 2.
    for path in (group / "memory.events", group / "memory.oom_control", *([Path("/proc/vmstat")] if group == _ROOT else [])):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _room(group: Path) -> Iterator[int]:
    """Yield the memory that the group, and each one around it, may still use, as far as they are limited."""
    for folder in (group, *group.parents):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # "max": it is not limited
                yield max(0, int((folder / limit).read_text()) - int((folder / used).read_text()))
        if folder == _ROOT:
            return
