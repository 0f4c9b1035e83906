"""Ends what an interrupted cell's child processes leave running.

``subprocess.run(command, shell=True)`` kills the shell when it is interrupted, and what the shell has started runs on; in a
terminal Ctrl-C would have reached it. Rule: a process below a child of this rank at the moment of an interrupt is killed
when the run has ended and its parent is gone. What the cell has started itself, and what has a parent that lives, is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

# subprocess.run kills its shell, and does not wait for its end.
DYING_S = 0.2
_LOOK_S = 0.005


class Orphans:
    """Processes that may lose their parents in a run."""

    def __init__(self) -> None:
        self._below: set[int] = set()

    def begin(self) -> None:
        """A run begins."""
        self._below.clear()

    def note(self) -> None:
        """An interrupt is about to come. Takes a millisecond where there are a few processes."""
        for child in _children(os.getpid()):
            self._below.update(_descendants(child))

    def end(self) -> None:
        """The run has ended: kill those that have no parent any more, which makes this rank their parent. Blocks for DYING_S."""
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
    """Of all the threads of a process; none where the system has no such list."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found
