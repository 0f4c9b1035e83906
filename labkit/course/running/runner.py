"""The execution of notebooks without a browser.

Each notebook has one kernel and one process that reads it. The calling thread starts them, keeps their deadlines and collects
results. A notebook that runs out of time is first interrupted, as by the stop button, so that its executed copy shows where it was.
If it does not react, it is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.base import machine, places
from labkit.course.files import NotebookError, OverwriteError, refuse_foreign, shown
from labkit.course.parameters import refuse_unknown, source_of
from labkit.course.running.execution import Attempt, Event, NotebookResult, is_executed_copy

if importlib.util.find_spec("papermill") is None:  # only the process that reads a notebook imports it
    raise ModuleNotFoundError("No module named 'papermill'")

OnCell = Callable[[Path, int, int], None]
OnResult = Callable[[NotebookResult], None]

TIMEOUT_S = 600.0
# A kernel, a fork server with torch in it, and four ranks with a small model.
MEMORY_PER_NOTEBOOK_BYTES = 3 * 2**30


def default_jobs() -> int:
    """Choose how many notebooks to run at once here, from cores and free memory; 1 if they would share GPUs."""
    if machine.nvidia_gpus():
        return 1
    return max(1, min(machine.usable_cores() // 2, machine.available_memory_bytes() // MEMORY_PER_NOTEBOOK_BYTES))


def run_notebooks(
    notebooks: Sequence[Path],
    out: Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
    jobs: int | None = None,
    on_cell: OnCell | None = None,
    on_result: OnResult | None = None,
) -> list[NotebookResult]:
    """Execute notebooks from top to bottom, each in its own kernel with its own folder as working directory.

    A cell that raises or ends its kernel ends its notebook, and the others go on. Processes that a notebook has started do not
    outlive it.

    Args:
        notebooks: The notebooks. They are only read.
        out: The folder for the executed copies; it is made if it does not exist.
        parameters: Values for names in the cell tagged ``parameters``.
        timeout_s: Time limit for one notebook in all, in seconds. It ends at most 5 s later, whatever it does.
        jobs: The number of notebooks to run at once; None means :func:`default_jobs`.
        on_cell: Called as ``on_cell(notebook, finished_cells, num_cells)``.
        on_result: Called with each result as it arrives. On Ctrl-C it is called for every notebook that did not finish.

    Returns:
        One result per notebook, in the order given.

    Raises:
        UnknownParameterError: A notebook lacks one of ``parameters``. Nothing has run.
        ParameterValueError: A value is not a literal. Nothing has run.
        OverwriteError: A copy would overwrite a notebook, or a file that no earlier run wrote. Nothing has run.
        PlaceError: A link that another user has made leads to the folder. Nothing has run.
        KeyboardInterrupt: Ctrl-C was pressed. Every kernel has ended.

    Blocks for at most ``timeout_s`` plus 5 s per notebook. Ranks: controller.
    """
    plan = _plan(notebooks, out, parameters or {})
    session = _Session(timeout_s, dict(parameters or {}), on_cell, on_result)
    with places.opened(out, make=True):
        pass  # it is there, or can be made
    return session.run(plan, max(1, jobs or default_jobs()))


def _plan(notebooks: Sequence[Path], out: Path, parameters: Mapping[str, Any]) -> list[tuple[Path, Path]]:
    """Pair each notebook with the path of its executed copy, or raise an error."""
    for value in parameters.values():
        source_of(value)
    plan: list[tuple[Path, Path]] = []
    taken: set[str] = set()
    for notebook in notebooks:
        if out.exists() and notebook.resolve().parent.samefile(out):
            raise OverwriteError(
                f"{shown(out)} holds {shown(notebook.name)} itself, and its executed copy would overwrite it. "
                "Choose another folder."
            )
        if parameters:
            with contextlib.suppress(NotebookError):  # its own result then reports the error
                refuse_unknown(notebook, parameters)
        names = (f"{notebook.stem}{suffix}.ipynb" for suffix in ("", *(f"-{number}" for number in range(2, len(notebooks) + 1))))
        # Some file systems treat names as equal that differ only in case.
        name = next(name for name in names if name.casefold() not in taken)
        taken.add(name.casefold())
        refuse_foreign(out / name, notebooks, is_executed_copy)
        plan.append((notebook, out / name))
    return plan


class _Session:
    """The work of the calling thread: it starts runs, keeps their deadlines, and passes on results."""

    def __init__(self, timeout_s: float, parameters: dict[str, Any], on_cell: OnCell | None, on_result: OnResult | None) -> None:
        self.timeout_s, self.parameters = timeout_s, parameters
        self.on_cell, self.on_result = on_cell, on_result
        self.events: queue.Queue[Event] = queue.Queue()
        self.active: list[Attempt] = []
        self.results: dict[Path, NotebookResult] = {}

    def run(self, plan: Sequence[tuple[Path, Path]], jobs: int) -> list[NotebookResult]:
        pending = list(plan)
        try:
            while pending or self.active:
                while pending and len(self.active) < jobs:
                    self.active.append(Attempt(*pending.pop(0), self.parameters, self.timeout_s, self.events))
                self._report_cells()
                for run in list(self.active):
                    run.keep_deadline()
                    if run.is_over():
                        self.active.remove(run)
                        self._emit(run.result())
        except BaseException:
            self._stop(pending)
            raise
        return [self.results[executed] for _, executed in plan]

    def _report_cells(self) -> None:
        """Wait a moment for news of cells and pass it on."""
        for _ in range(self.events.qsize() or 1):
            try:
                run, finished, total = self.events.get(timeout=0.1)
            except queue.Empty:
                return
            if self.on_cell and run in self.active:
                self.on_cell(run.notebook, finished, total)

    def _emit(self, result: NotebookResult) -> None:
        self.results[result.executed] = result
        if self.on_result:
            self.on_result(result)

    def _stop(self, pending: Sequence[tuple[Path, Path]]) -> None:
        for run in self.active:
            run.kill()
            self._emit(run.result(interrupted=True))
        for notebook, executed in pending:
            self._emit(NotebookResult(notebook, executed, "not run"))
