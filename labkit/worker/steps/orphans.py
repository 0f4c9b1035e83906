"""Cleanup of processes that the children of an interrupted cell leave running.

``subprocess.run(command, shell=True)`` kills the shell when it is interrupted, and processes that the shell has started run on. In
a terminal Ctrl-C would have reached them. So the descendants of this rank's children are noted at the moment of an interrupt, and
killed when the run has ended if their parent is gone. Processes that the cell has started itself, and processes whose parent lives,
are left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

# subprocess.run kills its shell and does not wait for its end.
DYING_S = 0.2
_LOOK_S = 0.005


class Orphans:
    """Processes that may lose their parents in a run."""

    def __init__(self) -> None:
        self._below: set[int] = set()

    def begin(self) -> None:
        """Begin a run: forget earlier processes."""
        self._below.clear()

    def note(self) -> None:
        """Note the descendants of this rank's children, just before an interrupt. Takes a millisecond for a few processes."""
        for child in _children(os.getpid()):
            self._below.update(_descendants(child))

    def end(self) -> None:
        """Kill noted processes that have lost their parent, so that this rank is their parent now. Blocks for DYING_S at most."""
        deadline = time.monotonic() + DYING_S
        while self._below and time.monotonic() < deadline:
            for pid in self._below.intersection(_children(os.getpid())):
                self._below.discard(pid)
                self._below.update(_descendants(pid))
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            self._below = {pid for pid in self._below if os.path.exists(f"/proc/{pid}")}
            time.sleep(_LOOK_S)


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process; empty if the system does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found
