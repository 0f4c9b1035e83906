"""A display that appears after two seconds and shows what a cell waits for: a starting pool, running ranks, a checkpoint.

It appears only if a person watches, that is, in a frontend that can ask for input. papermill and nbclient cannot, so they do not
save it in notebooks. The display is emptied when the cell ends.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.base.plain_text import name_ranks
from labkit.base.progress import SHOWN_AFTER_S, Task, running
from labkit.controller.current import num_starting, open_pool
from labkit.controller.start.launchers import fork_server
from labkit.notebook.views.live import LiveDisplay, person_watches
from labkit.wire.messages import TaskReport

MIB = 1 << 20
EVERY_S = 0.5


@dataclass(frozen=True)
class Stage:
    """A stage of the wait.

    Attributes:
        what: A description.
        done: The number of ranks or bytes that are done, None if they are not counted.
        total: The number of all ranks or bytes, None if it is not known.
    """

    what: str
    done: int | None = None
    total: int | None = None


def present_stage() -> Stage | None:
    """Return what the notebook waits for: a pool's start, a run, or a task of this process; None for anything else."""
    if starting := num_starting():
        ranks = f"{starting} rank{'s' if starting > 1 else ''}"
        cold = fork_server.available() and not fork_server.shared().warm
        return Stage(f"Starting {ranks}" + (". torch is imported first, once for this kernel" if cold else ""))
    if (task := running()) is not None:
        return _stage_of(task)
    pool = open_pool()
    diagnosis = pool.look() if pool is not None else None
    if diagnosis is None:
        return None
    ours = [state for state in diagnosis.states if state.state != "idle"]
    tasks = {state.rank: state.report.task for state in ours if state.report is not None and state.report.task is not None}
    if tasks:
        return _stage_of_ranks(tasks)
    done = sum(state.state in ("finished", "failed", "dead") for state in ours)
    return Stage(f"{done} of {len(ours)} ranks have finished", done, len(ours))


def _stage_of(task: Task | TaskReport) -> Stage:
    done = f"{task.done_bytes / MIB:,.1f}"
    if not task.total_bytes:
        return Stage(f"{task.title}: {done} MiB")
    return Stage(
        f"{task.title}: {done} of {task.total_bytes / MIB:,.1f} MiB", min(task.done_bytes, task.total_bytes), task.total_bytes
    )


def _stage_of_ranks(tasks: Mapping[int, TaskReport]) -> Stage:
    """Return one stage for the tasks of several ranks: the lowest rank's task, with the progress of all ranks that do the same."""
    title = tasks[min(tasks)].title
    same = {rank: task for rank, task in tasks.items() if task.title == title}
    totals = [task.total_bytes for task in same.values() if task.total_bytes is not None]
    total = sum(totals) if len(totals) == len(same) else None
    return _stage_of(TaskReport(f"{name_ranks(same)}: {title}", sum(task.done_bytes for task in same.values()), total))


class CellProgress:
    """The progress of one cell, shown from a separate thread."""

    def __init__(self) -> None:
        self._end, self._lock = threading.Event(), threading.Lock()
        self._place = LiveDisplay()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="labkit-progress", daemon=True)

    def start(self) -> None:
        """Watch the cell that begins now."""
        self._thread.start()

    def stop(self) -> None:
        """Clear the display, because the cell has ended. Does not wait for the thread, which may still be looking at ranks."""
        with self._lock:
            self._end.set()
            self._place.clear()

    def _watch(self) -> None:
        wait_s = SHOWN_AFTER_S
        while not self._end.wait(wait_s):
            wait_s = EVERY_S
            stage = present_stage()
            seconds = time.monotonic() - self._began
            with self._lock:
                if self._end.is_set():
                    return
                if stage is None:
                    self._place.clear()
                else:
                    self._place.show(f"{stage.what}, {seconds:.0f} s", stage_html(stage, seconds))


def stage_html(stage: Stage, seconds: float) -> str:
    """Return a bar with its text."""
    counts = f' value="{stage.done}" max="{stage.total}"' if stage.total else ""
    words = html.escape(stage.what, quote=True)
    return f'<div role="status"><progress{counts} aria-label="{words}"></progress> {words}, {seconds:.0f} s</div>'


_running: list[CellProgress] = []


def register(shell: Any) -> None:
    """Watch the cells of a shell. A second call changes nothing."""
    if _before_cell not in shell.events.callbacks["pre_run_cell"]:
        shell.events.register("pre_run_cell", _before_cell)
        shell.events.register("post_run_cell", _after_cell)


def _before_cell(info: Any) -> None:
    if person_watches():
        _after_cell(None)
        _running.append(CellProgress())
        _running[-1].start()


def _after_cell(result: Any) -> None:
    while _running:
        _running.pop().stop()
