"""Progress of long tasks in this process, for the notebook's cell or the terminal that waits for them.

Slow code opens a `task` and reports how much is done. A task that takes less than two seconds shows nothing. In a terminal, a bar
on stderr shows the task until it ends. In a notebook, the cell shows it (`labkit.notebook.views.progress`). Elsewhere nothing is
shown.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

SHOWN_AFTER_S = 2.0


class Task:
    """A long task, measured in bytes.

    Attributes:
        title: The task's name, one or two words.
        total_bytes: The number of bytes to process; None if that is not known.
        done_bytes: The number of bytes processed so far.
    """

    def __init__(self, title: str, total_bytes: int | None) -> None:
        self.title, self.total_bytes = title, total_bytes
        self.done_bytes = 0
        self._lock = threading.Lock()

    def advance(self, size_bytes: int) -> None:
        """Count bytes as done. Any thread may call this."""
        with self._lock:
            self.done_bytes += size_bytes


_running: list[Task] = []


def running() -> Task | None:
    """Return the process's current task, or None. If tasks are nested, return the outermost, which is the one the user started."""
    return next(iter(_running), None)


@contextmanager
def task(title: str, total_bytes: int | None = None) -> Iterator[Task]:
    """Show the progress of the block, which may take long.

    Args:
        title: The task's name, one or two words.
        total_bytes: The number of bytes to process, if known.

    Yields:
        The task. Call its ``advance`` for the bytes that are done.

    Ranks: local. If several ranks share a terminal, only rank 0 shows a bar.
    """
    present = Task(title, total_bytes)
    if threading.current_thread() is not threading.main_thread():
        yield present  # work in a background thread shows no bar
        return
    _running.append(present)
    bar = _TerminalBar(present) if _running[0] is present and _terminal_watches() else None
    try:
        yield present
    finally:
        _running.remove(present)
        if bar is not None:
            bar.end()


def _terminal_watches() -> bool:
    """Return whether a person sees stderr as a terminal: not in a Jupyter kernel, and only on rank 0 if there are ranks."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


class _TerminalBar:
    """A bar on stderr that disappears when the task has ended."""

    def __init__(self, present: Task) -> None:
        self._task = present
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="labkit-progress-bar", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Remove the bar."""
        self._ended.set()
        self._thread.join()

    def _show(self) -> None:
        if self._ended.wait(SHOWN_AFTER_S):
            return
        with _bars() as bars:
            shown = bars.add_task(self._task.title, total=self._task.total_bytes)
            while not self._ended.wait(0.1):
                bars.update(shown, completed=self._task.done_bytes)


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)
