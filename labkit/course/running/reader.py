"""The process that runs one notebook's cells: it starts the kernel, takes the outputs and keeps the executed copy.

`labkit.course.running.execution` starts one such process for each notebook and keeps the deadline from outside, so this process
cannot delay it. They exchange lines of JSON: the job comes on standard input, and news go to a pipe. When standard input ends, the
caller has gone, and everything that the notebook has started is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from papermill.execute import raise_for_execution_errors, remove_error_markers
from papermill.iorw import load_notebook_node

import labkit
from labkit.base.own_python import own_python
from labkit.course.files import NotebookError, read_notebook, shown
from labkit.course.parameters import inject
from labkit.course.running.client import Channel, Client, ExecutedCopy
from labkit.course.running.execution import COPY, kill_descendants
from labkit.course.running.outputs import shortened

START_TIMEOUT_S = 120
LAST_WORDS_LINES = 15
_LAST_WORDS_S = 0.5
_PIECE = 1 << 14
_LAUNCHER = ["-m", "ipykernel_launcher"]
# labkit's folder is on the path only for this import, so the notebook has the same import path as under Jupyter.
_START_KERNEL = "import sys; sys.path.append(sys.argv.pop()); from labkit.course.running.kernel import main; sys.path.pop(); main()"
_PR_SET_CHILD_SUBREAPER = 36


class KernelOutput:
    """The output of the kernel's process outside the notebook: of a long one, the beginning and the end."""

    def __init__(self) -> None:
        self._begin = b""
        self._end: deque[bytes] = deque(maxlen=4)
        self._thread: threading.Thread | None = None

    def follow(self, fd: int) -> None:
        """Read from a pipe until every process has closed its other end."""
        self._thread = threading.Thread(target=self._read, args=(fd,), name="last words", daemon=True)
        self._thread.start()

    def _read(self, fd: int) -> None:
        with open(fd, "rb", buffering=0) as pipe:
            while piece := pipe.read(_PIECE):
                if len(self._begin) < _PIECE:
                    self._begin += piece
                else:
                    self._end.append(piece)

    def __str__(self) -> str:
        if self._thread is not None:
            self._thread.join(_LAST_WORDS_S)
        lines = b"".join([self._begin, *self._end]).decode(errors="replace").splitlines()
        if len(lines) > 2 * LAST_WORDS_LINES:
            # A crash report has its cause at the top and its place at the end.
            lines = [*lines[:LAST_WORDS_LINES], "...", *lines[-LAST_WORDS_LINES:]]
        return "\nIts last words:\n" + shortened("\n".join(lines)) if lines else ""


class Manager(AsyncKernelManager):
    """A manager that starts the kernel, reports its process, and uses Unix sockets: no TCP port, so no race for one."""

    def __init__(self, folder: Path, channel: Channel) -> None:
        super().__init__(kernel_name="python3")
        self.transport = "ipc"
        self.connection_file = str(folder / "kernel.json")
        self.words = KernelOutput()
        self.channel = channel
        self.process: subprocess.Popen[bytes] | None = None

    def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
        """Return the kernel's command with ``-P``: it starts in the notebook's folder, where others may have planted a module."""
        program, *arguments = super().format_kernel_cmd(extra_arguments)
        if arguments[:2] != _LAUNCHER:  # somebody's own program, such as a wrapper around Python
            return [program, *arguments]
        return own_python("-c", _START_KERNEL, *arguments[2:], str(Path(labkit.__file__).parents[1]), program=program)

    # The base class declares a plain function and assigns a coroutine function.
    async def start_kernel(self, **kwargs: Any) -> None:  # type: ignore[override]
        """Start the kernel, and follow what its process writes outside the notebook."""
        words, output = os.pipe()
        self.words.follow(words)
        try:
            await super().start_kernel(stdout=output, stderr=subprocess.STDOUT, **kwargs)
        finally:
            os.close(output)
        self.process = getattr(self.provisioner, "process", None)
        self.channel.tell(kernel=self.process.pid if self.process else None)


def _cause_of_death(process: subprocess.Popen[bytes] | None) -> str:
    code = process.poll() if process else None
    if code is None:
        return "cause unknown"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _prepared(job: dict[str, Any]) -> NotebookNode:
    path = Path(job["notebook"])
    notebook = load_notebook_node(read_notebook(path))
    if job["parameters"]:
        inject(notebook, job["parameters"])
        notebook = load_notebook_node(notebook)
    notebook.metadata.papermill.update(parameters=job["values"], input_path=shown(path), output_path=job["output"])
    found: NotebookNode = remove_error_markers(notebook)
    return found


def run(job: dict[str, Any], channel: Channel) -> None:
    """Run a notebook and report the result as ``done``: its status and error, and the cells whose output was cut."""
    folder = Path(job["folder"])
    try:
        notebook = _prepared(job)
    except NotebookError as error:
        channel.tell(done={"status": "failed", "error": str(error), "cut": []})
        return
    copy = ExecutedCopy(notebook, output_path=str(folder / COPY), progress_bar=False, autosave_cell_every=0)
    copy.notebook_start()
    manager = Manager(folder, channel)
    # Use this kernel, whatever the notebook was saved with: labkit is installed in it.
    client = Client(
        copy,
        channel,
        job["cell_limit"],
        km=manager,
        kernel_name="python3",
        startup_timeout=START_TIMEOUT_S,
        # The deadline is kept elsewhere; a long output takes some time after the cell's reply.
        iopub_timeout=max(4, int(job["timeout_s"])),
        record_timing=False,
        resources={"metadata": {"path": str(Path(job["notebook"]).resolve().parent)}},
    )
    client.owns_km = True  # so that nbclient shuts the kernel down
    status = "passed"
    try:
        client.execute()
        status = "failed" if client.error else "passed"
    except DeadKernelError:
        status, client.error = "died", f"The kernel's process ended ({_cause_of_death(manager.process)})."
    except Exception as error:
        status, client.error = "failed", shortened(f"{type(error).__name__}: {error}")
    copy.notebook_complete()
    with contextlib.suppress(PapermillExecutionError):
        raise_for_execution_errors(copy.nb, str(folder / COPY))
    client.error += "" if status == "passed" else str(manager.words)
    channel.tell(done={"status": status, "error": client.error, "cut": client.cut})


def _end_with_parent() -> None:
    """Wait until the caller has ended, then end this process and all that the notebook has started."""
    sys.stdin.buffer.read()
    kill_descendants(os.getpid())
    os._exit(0)


def main() -> None:
    """Run the job that comes on standard input."""
    channel = Channel(int(sys.argv[1]))
    if sys.platform == "linux":
        # Orphans of the notebook's processes become children of this process, so they can be found and ended.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # nbclient also reports a dead kernel through papermill's logger, which writes to stderr if it has no handler.
    logging.getLogger("papermill").addHandler(logging.NullHandler())
    job = json.loads(sys.stdin.buffer.readline())
    waiting = threading.Thread(target=_end_with_parent, name="end with parent")
    waiting.start()
    try:
        run(job, channel)
    except Exception as error:
        channel.tell(done={"status": "failed", "error": shortened(f"{type(error).__name__}: {error}"), "cut": []})
    waiting.join()
