"""One attempt at one notebook: a thread with papermill in it, the kernel, the deadline, the verdict."""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nbformat
import papermill
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

Status = Literal["passed", "failed", "timed out", "died", "interrupted", "not run"]

START_TIMEOUT_S = 120
# A pool needs some of this to free its ranks from a collective.
INTERRUPT_GRACE_S = 15.0
# nbclient looks once a second whether the kernel lives.
KILL_GRACE_S = 15.0
LAST_WORDS_LINES = 15
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# nbclient reports a dead kernel through papermill's logger as well, onto stderr when nobody listens.
logging.getLogger("papermill").addHandler(logging.NullHandler())


@dataclass(frozen=True)
class NotebookResult:
    """What became of one notebook.

    Attributes:
        notebook: The notebook.
        executed: Its executed copy; it may be missing when the kernel did not start.
        status: ``passed``, ``failed`` (a cell raised), ``timed out``, ``died`` (the kernel's process ended),
            ``interrupted`` (Ctrl-C) or ``not run`` (Ctrl-C came first).
        seconds: Wall time, the start of the kernel included.
        error: What went wrong as plain text, empty when it passed.
        attempts: 2 when the kernel stopped answering the first time; see :func:`run_notebooks`.
    """

    notebook: Path
    executed: Path
    status: Status
    seconds: float = 0.0
    error: str = ""
    attempts: int = 1

    @property
    def passed(self) -> bool:
        """Whether every cell ran."""
        return self.status == "passed"


class Attempt:
    """One attempt at one notebook: its thread, its kernel, its deadline."""

    def __init__(
        self,
        notebook: Path,
        executed: Path,
        parameters: Mapping[str, Any],
        timeout_s: float,
        attempt: int,
        events: queue.Queue[tuple[Attempt, int, int]],
    ) -> None:
        self.notebook, self.executed, self.parameters = notebook, executed, dict(parameters)
        self.timeout_s, self.attempt, self.events = timeout_s, attempt, events
        # A daemon: should papermill itself hang, the program can still end.
        self.thread = threading.Thread(target=self._execute, name=f"labkit run {notebook.name}", daemon=True)
        self.started = time.monotonic()
        self.interrupted_at: float | None = None
        self.killed_at: float | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.seconds: float | None = None
        self.error: BaseException | None = None
        self.last_words = ""

    @property
    def stalled(self) -> bool:
        """Whether the kernel ran out of time and did not answer the interrupt either."""
        return self.interrupted_at is not None and self.killed_at is not None

    def keep_deadline(self) -> None:
        """Interrupt the kernel when its time is up, and kill it when it does not answer."""
        now = time.monotonic()
        if self.interrupted_at is None:
            if now > self.started + self.timeout_s:
                self.interrupted_at = now
                self._signal(signal.SIGINT)
        elif self.killed_at is None and now > self.interrupted_at + INTERRUPT_GRACE_S:
            self.kill()

    def is_over(self) -> bool:
        """Whether the thread has ended, or is given up because not even a killed kernel ended it."""
        given_up = self.killed_at is not None and time.monotonic() > self.killed_at + KILL_GRACE_S
        return given_up or not self.thread.is_alive()

    def kill(self) -> None:
        """Kill the kernel; the ranks of a pool in it end by themselves."""
        self.killed_at = time.monotonic()
        self._signal(signal.SIGKILL)

    def result(self) -> NotebookResult:
        """Judge by the exception: papermill stores ``completed`` also for a notebook whose kernel died."""
        seconds = self.seconds if self.seconds is not None else time.monotonic() - self.started
        status, error = self._verdict()
        return NotebookResult(self.notebook, self.executed, status, seconds, error, self.attempt)

    def _verdict(self) -> tuple[Status, str]:
        error = self.error
        if self.interrupted_at is not None:
            how = "the kernel did not answer the interrupt and was killed" if self.stalled else "it was interrupted"
            where = f":\n{_text(error)}" if isinstance(error, PapermillExecutionError) else ""
            return "timed out", f"the notebook did not finish in {self.timeout_s:g} s; {how}{where}"
        if error is None:
            return "passed", ""
        if isinstance(error, DeadKernelError):
            return "died", f"the kernel's process ended ({self._cause_of_death()}).{self.last_words}"
        return "failed", _text(error)

    def _cause_of_death(self) -> str:
        code = self.process.poll() if self.process else None
        if code is None:
            return "cause unknown"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _signal(self, signum: signal.Signals) -> None:
        """Signal the kernel's process group, as JupyterLab does; a kernel is the leader of its own session."""
        if self.process is not None and self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signum)
            except ProcessLookupError:
                return

    def _execute(self) -> None:
        try:
            # Short paths: a Unix socket's path ends at about 100 characters.
            with tempfile.TemporaryDirectory(prefix="labkit-run-", ignore_cleanup_errors=True) as folder:
                try:
                    self._papermill(Path(folder))
                finally:
                    self.last_words = _last_words(Path(folder, "output.txt"))
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - self.started

    def _papermill(self, folder: Path) -> None:
        num_cells = len(nbformat.read(self.notebook, as_version=4).cells)

        def on_notebook_start(notebook: Any) -> None:
            self.events.put((self, 0, num_cells))

        # nbclient's on_cell_complete comes when a cell has been sent.
        def on_cell_executed(cell: Any, cell_index: int, execute_reply: Any) -> None:
            self.events.put((self, cell_index + 1, num_cells))

        papermill.execute_notebook(
            str(self.notebook),
            str(self.executed),
            parameters=self.parameters,
            # Whatever kernel its author saved it with: labkit is installed in this one.
            kernel_name="python3",
            language="python",
            progress_bar=False,
            start_timeout=START_TIMEOUT_S,
            autosave_cell_every=0,
            coalesce_streams=True,
            record_timing=False,
            kernel_manager_class=_manager_class(self, folder),
            # Not papermill's cwd: that changes the directory of this whole process, under every other thread.
            resources={"metadata": {"path": str(self.notebook.resolve().parent)}},
            on_notebook_start=on_notebook_start,
            on_cell_executed=on_cell_executed,
        )


def _manager_class(run: Attempt, folder: Path) -> type[AsyncKernelManager]:
    """A kernel manager that tells ``run`` its process, and talks over Unix sockets: no TCP port, nothing to race for."""

    class Manager(AsyncKernelManager):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.transport = "ipc"
            self.connection_file = str(folder / "kernel.json")

        # The base class declares a plain function and assigns a coroutine function.
        async def start_kernel(self, **kwargs: Any) -> None:  # type: ignore[override]
            with open(folder / "output.txt", "wb") as output:
                await super().start_kernel(stdout=output, stderr=subprocess.STDOUT, **kwargs)
            run.process = getattr(self.provisioner, "process", None)

    return Manager


def _text(error: BaseException) -> str:
    if isinstance(error, PapermillExecutionError):
        return _ANSI.sub("", "\n".join(error.traceback) or f"{error.ename}: {error.evalue}")
    return f"{type(error).__name__}: {error}"


def _last_words(path: Path) -> str:
    """What the kernel's process wrote past the notebook, such as the report of a segmentation fault; long ones shortened."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    if len(lines) > 2 * LAST_WORDS_LINES:
        # A crash report has its cause at the top and its place at the end.
        lines = [*lines[:LAST_WORDS_LINES], "...", *lines[-LAST_WORDS_LINES:]]
    return "\nIts last words:\n" + "\n".join(lines) if lines else ""
