"""Detection of ranks that Linux killed because memory ran out, from the kernel's counts for each control group.

The death of a rank by SIGKILL is blamed on memory if both of these hold, and otherwise reported as "from outside":

* the kernel's counter of such kills in the rank's own control group rose in the last FRESH_S; each rise explains one rank;
* the rank's largest size was at least half of the memory that its group had free a moment after its death: the kernel kills a large
  process, and its end frees that much.

So a rank that somebody kills while the kernel kills another process of its group is not blamed on memory. If several ranks are
killed together, they may not be blamed on memory either, because each had less than half of what they freed together.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from labkit.base.machine import MemoryAtDeath

# A process of hundreds of gigabytes takes seconds to end after it has been killed.
FRESH_S = 10.0
_ROOT = Path("/sys/fs/cgroup")


class OomKills:
    """A watch on the control groups of a machine's ranks."""

    def __init__(self) -> None:
        self._groups: dict[int, Path] = {}
        self._counts: dict[Path, int] = {}
        self._rises: dict[Path, list[float]] = defaultdict(list)

    def look(self, living: Iterable[int]) -> None:
        """Record the control group of each living rank, given by process id, and the kernel's present count for each group."""
        for pid in living:
            if (group := _memory_group(pid)) is not None:
                self._groups[pid] = group
        for group in set(self._groups.values()):
            count = _oom_kills(group)
            self._rises[group] += [time.monotonic()] * (count - self._counts.get(group, count))
            self._counts[group] = count

    def at_death(self, pid: int, peak_bytes: int, *, by_sigkill: bool) -> MemoryAtDeath:
        """Return the memory of the machine when a rank was found dead, and whether the rank was killed because memory ran out."""
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
    """Return the folder of the control group that accounts for a process's memory; None without one or if the process is ending."""
    try:
        lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        # An ending process gives up its memory first, and then counts as a member of the outermost group (in version 1).
        if Path(f"/proc/{pid}/statm").read_text().startswith("0 "):
            return None
    except OSError:
        return None
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/")
    return next((_ROOT / path.lstrip("/") for _, controllers, path in lines if not controllers), None)


def _oom_kills(group: Path) -> int:
    """Return the number of the group's processes that Linux has killed because memory ran out; 0 if it is not counted."""
    # The counter in version 2 of control groups, in version 1, and (for the outermost group of version 2) for the whole machine.
    for path in (group / "memory.events", group / "memory.oom_control", *([Path("/proc/vmstat")] if group == _ROOT else [])):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _room(group: Path) -> Iterator[int]:
    """Yield the memory that the group, and each group around it, may still use, as far as they are limited."""
    for folder in (group, *group.parents):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                yield max(0, int((folder / limit).read_text()) - int((folder / used).read_text()))
        if folder == _ROOT:
            return
