"""A progress bar in bytes for the command line; silent when nobody watches."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class ByteProgress:
    """A bar on stderr while a command reads and writes.

    Args:
        title: What the command does.
        total: Bytes to do, or None when it is not known.
        show: False for no bar, as when stderr is no terminal.
    """

    def __init__(self, title: str, total: int | None = None, *, show: bool = True) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not (show and sys.stderr.isatty()))
        self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> ByteProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, size_bytes: int) -> None:
        """Note bytes as done. Any thread may call it."""
        self._bar.advance(self._task, size_bytes)

    def expect(self, total: int) -> None:
        """Set how many bytes there are to do."""
        self._bar.update(self._task, total=total)
