"""What takes long in this process and how far it is, for the notebook's cell or the terminal that waits for it.

Whoever does something long opens a `task` and says how much is done. Below two seconds nothing shows. In a terminal a bar
stands on stderr as long as it takes; in a notebook the cell shows it (`labkit.notebook.progress`); elsewhere nothing does.
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
    """Something that takes long, counted in bytes.

    Attributes:
        title: What it is, in a word or two.
        total_bytes: How many bytes it has to do; None when that is not known.
        done_bytes: How many it has done.
    """

    def __init__(self, title: str, total_bytes: int | None) -> None:
        self.title, self.total_bytes = title, total_bytes
        self.done_bytes = 0
        self._lock = threading.Lock()

    def advance(self, size_bytes: int) -> None:
        """Note bytes as done. Any thread may call it."""
        with self._lock:
            self.done_bytes += size_bytes


_running: list[Task] = []


def running() -> Task | None:
    """The task that the process is at, or None: of tasks inside each other the outermost, which somebody asked for."""
    return next(iter(_running), None)


@contextmanager
def task(title: str, total_bytes: int | None = None) -> Iterator[Task]:
    """Let it be seen that the block takes long.

    Args:
        title: What it is, in a word or two.
        total_bytes: How many bytes it has to do, where that is known.

    Yields:
        The task, to be told of what is done.

    Ranks: local. Of several ranks in one terminal only rank 0 shows a bar.
    """
    present = Task(title, total_bytes)
    if threading.current_thread() is not threading.main_thread():
        yield present  # nobody waits for what goes on in the background
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
    """Whether a person sees stderr as a terminal: not in a Jupyter kernel, and on rank 0 where there are ranks."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


class _TerminalBar:
    """A bar on stderr, gone when the task has ended."""

    def __init__(self, present: Task) -> None:
        self._task = present
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="labkit-progress-bar", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take the bar away."""
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
