"""One attempt at one notebook: the process that reads it, its deadline, its clean-up, and the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import nbformat
import psutil
from nbformat import NotebookNode

import labkit
from labkit.base import places, torch_caches
from labkit.base.limits import LIMITS
from labkit.base.own_python import own_python
from labkit.course.files import is_sealed, plain, replace_file, sealed, shown
from labkit.course.parameters import INJECTED, source_of
from labkit.course.running import outputs

Status = Literal["passed", "failed", "timed out", "died", "output cut", "interrupted", "not run"]
Event = tuple["Attempt", int, int]

_WRITER = "labkit run"
# Files in the folder of an attempt.
COPY, READER_OUTPUT = "copy.ipynb", "reader.txt"
_LAST_WORDS_CHARS = 2000
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ERROR_MARK = "papermill-error-cell-tag"
# Processes that a notebook starts inherit this variable, so they are found even when the process that read the notebook is gone.
_MARK = "LABKIT_RUN_FOLDER"
_START = """\
import sys
sys.path.append(sys.argv.pop())
from labkit.course.light_nbformat import import_nbformat
import_nbformat()
from labkit.course.running.reader import main
main()
"""


@dataclass(frozen=True)
class NotebookResult:
    """The result of one notebook.

    Attributes:
        notebook: The notebook.
        executed: Its executed copy; it may be missing if the kernel did not start.
        status: ``passed``, ``failed`` (a cell raised, or ended the notebook early), ``timed out``, ``died`` (the kernel's process
            ended), ``output cut`` (every cell ran, but one put out more than is kept), ``interrupted`` (Ctrl-C) or ``not run``
            (Ctrl-C came first).
        seconds: Wall time, including the start of the kernel.
        error: The error as plain text, empty if the notebook passed. It names the cell first.
        cell: The cell that failed or was running at the end; empty if all ran.
        not_run: The cells that therefore did not run.
    """

    notebook: Path
    executed: Path
    status: Status
    seconds: float = 0.0
    error: str = ""
    cell: str = ""
    not_run: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every cell ran and the executed copy contains all output."""
        return self.status == "passed"


class Attempt:
    """One attempt at one notebook.

    Args:
        notebook: The notebook.
        executed: The final path of its executed copy. Until the end the copy is in the attempt's own folder.
        parameters: Values for names of its cell tagged ``parameters``.
        timeout_s: Time limit in seconds.
        events: The queue that gets the number of finished cells and of all cells whenever it changes.

    Attributes:
        clock: The clock for its deadline, in seconds.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self, notebook: Path, executed: Path, parameters: Mapping[str, Any], timeout_s: float, events: queue.Queue[Event]
    ) -> None:
        self.notebook, self.executed, self.timeout_s, self.events = notebook, executed, timeout_s, events
        self._parameters = dict(parameters)
        self._kernel_pid: int | None = None
        self._interrupted_at: float | None = None
        self._killed_at: float | None = None
        self._done_at: float | None = None
        self._done: dict[str, Any] | None = None
        self.started = self.clock()
        self._folder = Path(places.new_temporary("labkit-run-", longest=places.FOR_SOCKETS))
        self._process = self._start_reader()

    def _start_reader(self) -> subprocess.Popen[bytes]:
        news, fd = os.pipe()
        command = own_python("-c", _START, str(fd), str(Path(labkit.__file__).parent.parent))
        with open(self._folder / READER_OUTPUT, "wb") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=[fd],
                start_new_session=True,
                env={**torch_caches.private(os.environ), _MARK: str(self._folder)},
            )
        os.close(fd)
        self._follower = threading.Thread(target=self._follow, args=(news,), name=f"labkit run {self.notebook.name}", daemon=True)
        self._follower.start()
        job = {
            "notebook": str(self.notebook),
            "output": shown(self.executed),
            "folder": str(self._folder),
            "parameters": {name: source_of(value) for name, value in self._parameters.items()},
            "values": {name: _json_value(value) for name, value in self._parameters.items()},
            "timeout_s": self.timeout_s,
            "cell_limit": outputs.CELL_LIMIT,
        }
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        return process

    def _follow(self, news: int) -> None:
        """Process the reader's messages until it has ended."""
        with open(news, "rb") as lines:
            for line in lines:
                told = json.loads(line)
                if "kernel" in told:
                    self._kernel_pid = told["kernel"]
                elif "cells" in told:
                    self.events.put((self, *told["cells"]))
                else:
                    self._done = told["done"]

    def keep_deadline(self) -> None:
        """Interrupt the kernel when its time is up, kill it if it does not react, and end processes that the notebook has left."""
        now = self.clock()
        if self._done is not None or self._process.poll() is not None:
            self._end_leftovers(now)
        elif self._interrupted_at is None:
            if now > self.started + self.timeout_s:
                self._interrupted_at = now
                self._interrupt_kernel()
        elif self._killed_at is None:
            if now > self._interrupted_at + (LIMITS.notebook_interrupt_s if self._kernel_pid else 0):
                self._killed_at = now
                kill_descendants(self._process.pid)
        elif now > self._killed_at + LIMITS.notebook_write_s:
            self.kill()

    def _end_leftovers(self, now: float) -> None:
        self._done_at = self._done_at or now
        late = self._interrupted_at is not None or now > self.started + self.timeout_s
        if late or now > self._done_at + LIMITS.notebook_leftovers_s or not descendants(self._process.pid):
            self.kill()

    def _interrupt_kernel(self) -> None:
        """Interrupt the kernel's process group, as JupyterLab does; a kernel leads its own session."""
        if self._kernel_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._kernel_pid, signal.SIGINT)

    def is_over(self) -> bool:
        """Return whether no process of the notebook is left."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill all processes that the notebook has started, and then its reader."""
        if self._process.poll() is not None:  # a dead reader's descendants are orphans: find them by their mark
            _kill_marked(str(self._folder))
        kill_descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def result(self, *, interrupted: bool = False) -> NotebookResult:
        """Judge the attempt, and move the executed copy to its place. Call this once, when the attempt is over."""
        self._follower.join(LIMITS.notebook_kill_s)
        seconds = (self._done_at or self.clock()) - self.started
        copy = self._read_copy()
        cell, not_run = _standing(copy) if copy is not None else ("", ())
        status, error = self._verdict()
        if interrupted:
            status, error = "interrupted", "interrupted from outside"
        if copy is not None:
            cut = [name for name, found in _numbered(copy) if found.get("id") in (self._done or {}).get("cut", ())]
            error = "\n".join(
                filter(None, [error, *(f"{name} wrote more output than is kept; the rest was left out" for name in cut)])
            )
            status = "output cut" if status == "passed" and cut else status
            try:
                replace_file(self.executed, sealed(copy, _WRITER), is_executed_copy)
            except (OSError, ValueError) as problem:
                status, error = "failed", f"its executed copy cannot be written: {problem}\n{error}".rstrip()
        if cell and status != "passed":
            error = f"{cell}; {_count(not_run)} not run. {error}"
        shutil.rmtree(self._folder, ignore_errors=True)
        return NotebookResult(self.notebook, self.executed, status, seconds, plain(_ANSI.sub("", error)), cell, not_run)

    def _verdict(self) -> tuple[Status, str]:
        done = self._done or {"status": "failed", "error": ""}
        if self._interrupted_at is not None:
            how = "it was interrupted" if self._killed_at is None else "the kernel did not answer the interrupt and was killed"
            told = done["error"] if self._killed_at is None else ""
            if done["status"] == "passed":
                how = "all cells ran, but the kernel did not end"
            return "timed out", f"The notebook did not finish in {self.timeout_s:g} s; {how}.\n{told}".rstrip()
        if self._done is None:
            words = (self._folder / READER_OUTPUT).read_text(errors="replace")[-_LAST_WORDS_CHARS:]
            return "failed", f"The process that ran the notebook ended (exit code {self._process.returncode}).\n{words}".rstrip()
        return done["status"], done["error"]

    def _read_copy(self) -> NotebookNode | None:
        """Return the executed copy. If its reader was killed, the cell that was running gets a note."""
        try:
            copy: NotebookNode = nbformat.read(self._folder / COPY, as_version=4)
        except (OSError, ValueError):
            return None
        for _, cell in _numbered(copy):
            if self._done is None and cell.metadata.get("papermill", {}).get("status") == "running" and cell.cell_type == "code":
                text = "labkit run: this cell was running when the notebook was ended; its output is lost.\n"
                cell.outputs = [nbformat.v4.new_output("stream", name="stderr", text=text)]
                copy.metadata.papermill["exception"] = True
        return copy


def is_executed_copy(file: BinaryIO) -> bool:
    """Return whether a file is an executed copy as a run has left it."""
    return is_sealed(file, _WRITER)


def _json_value(value: Any) -> Any:
    """Return a value for papermill's metadata: unchanged if JSON can represent it, else its Python source."""
    with contextlib.suppress(TypeError, ValueError):
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    return source_of(value)


def _numbered(copy: NotebookNode) -> list[tuple[str, NotebookNode]]:
    """Name the cells of an executed copy as in the notebook, without those that a run inserts."""
    found: list[tuple[str, NotebookNode]] = []
    number = 0
    for cell in copy.cells:
        tags = cell.metadata.get("tags", ())
        if INJECTED in tags:
            found.append(("the cell with the given parameters", cell))
        elif _ERROR_MARK not in tags:
            number += 1
            found.append((f"cell {number} (id {cell.get('id', 'unknown')})", cell))
    return found


def _standing(copy: NotebookNode) -> tuple[str, tuple[str, ...]]:
    """Return the cell at which a run ended, and the code cells after it; an empty name if all ran."""
    at, not_run = "", []
    for name, cell in _numbered(copy):
        status = cell.metadata.get("papermill", {}).get("status")
        if at and cell.cell_type == "code" and cell.source.strip():
            not_run.append(name)
        if not at and status in ("failed", "running"):
            at = name
    return at, tuple(not_run)


def _count(cells: tuple[str, ...]) -> str:
    return f"{len(cells)} code cell{'' if len(cells) == 1 else 's'} after it {'was' if len(cells) == 1 else 'were'}"


def descendants(pid: int) -> list[psutil.Process]:
    """Return the running descendants of a process."""
    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kill_marked(mark: str) -> None:
    """Kill all processes that have a run's mark in their environment, and those that they start meanwhile."""
    deadline = time.monotonic() + LIMITS.notebook_kill_s
    while (found := [process for process in psutil.process_iter() if _mark_of(process) == mark]) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=0.1)


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(_MARK)
    except psutil.Error:  # it has ended, or belongs to somebody else
        return None


def kill_descendants(pid: int) -> None:
    """Kill the descendants of a process, and those that they start meanwhile. The process itself is not killed."""
    deadline = time.monotonic() + LIMITS.notebook_kill_s
    while (found := descendants(pid)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=0.1)
