"""The display in a terminal while notebooks run: one line per notebook."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from labkit.course.files import shown
from labkit.course.running.execution import NotebookResult


class ProgressBars:
    """A bar for each notebook that runs, and a line for each that is done. Without a terminal there are only the lines.

    Attributes:
        results: The results so far, in the order of arrival.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.results: list[NotebookResult] = []
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("cells"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[Path, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bars.stop()

    def cell(self, notebook: Path, finished: int, total: int) -> None:
        """Move a notebook's bar."""
        if notebook not in self._tasks:
            self._tasks[notebook] = self._bars.add_task(shown(notebook.name), total=total)
        self._bars.update(self._tasks[notebook], completed=finished)

    def result(self, result: NotebookResult) -> None:
        """Replace a notebook's bar by its verdict."""
        self.results.append(result)
        if (task := self._tasks.pop(result.notebook, None)) is not None:
            self._bars.remove_task(task)
        style = "green" if result.passed else "bold red"
        self._console.print(f"[{style}]{result.status:<11}[/] {result.seconds:7.1f} s  {escape(shown(result.notebook.name))}")
