"""The controller's side of the fork server. There is one per kernel, shared by all pools and warm after its first use."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from typing import Any

from labkit.base.own_python import own_environ, own_python
from labkit.controller.start.launchers.launcher import OnExit, WorkerExit
from labkit.errors import WorkerStartError
from labkit.wire.spec import WorkerSpec

# The first answer waits for `import torch`, which took 26 s on a loaded 2-core machine.
FIRST_ANSWER_S = 180.0
ANSWER_S = 30.0


class ForkServer:
    """A launcher that forks workers from a process that has imported torch."""

    name = "fork server"

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # A file and not a pipe: it is read only at the end, and a full pipe would block the server.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        environ = dict(os.environ)
        environ.setdefault("OMP_NUM_THREADS", "1")
        # Start a new session: the notebook's interrupt button signals the kernel's process group, and must not reach the server.
        self._process = subprocess.Popen(
            own_python("-m", "labkit.worker.start.forkserver", "--fd", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,
            env=own_environ(environ),
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._send_lock = threading.Lock()
        self._tokens = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}
        self._starting: dict[int, OnExit] = {}
        self._on_exit: dict[int, OnExit] = {}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._broken: str | None = None
        threading.Thread(target=self._listen, name="labkit-fork-server", daemon=True).start()

    @property
    def alive(self) -> bool:
        """True if the server still runs."""
        return self._broken is None and self._process.poll() is None

    @property
    def warm(self) -> bool:
        """True if torch is imported, so that the next pool starts at once."""
        return self._ready.is_set() and self.alive

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def warm_up(self) -> None:
        """Wait until the server has imported torch; see :class:`Launcher`. Blocks for at most FIRST_ANSWER_S.

        Raises:
            WorkerStartError: The server has ended or does not answer.
        """
        self._ask("are you there")

    def start(self, spec: WorkerSpec, on_exit: OnExit) -> int:
        """Fork one worker; see :class:`Launcher`. Blocks for milliseconds, or until the server has imported torch.

        Raises:
            WorkerStartError: The server has ended or does not answer.
        """
        return int(self._ask("start", spec, on_exit=on_exit))

    def kill(self, pid: int) -> None:
        """Kill a worker; see :class:`Launcher`."""
        self._send("kill", pid)

    def count_gpus(self) -> int:
        """Return the number of CUDA devices under the present environment; see :class:`Launcher`."""
        return int(self._ask("count_gpus", dict(os.environ)))

    def guard_directory(self, path: str) -> None:
        """Ask the server to remove a pool's directory if this process ends without doing so."""
        self._send("directory", path)

    def forget_directory(self, path: str) -> None:
        """Tell the server that the directory has been removed."""
        self._send("forget", path)

    def stop(self) -> None:
        """End the server and every worker. Blocks for at most 5 s."""
        self._broken = self._broken or "the fork server was stopped"
        self._send("stop")
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, *message: Any) -> None:
        with self._send_lock:
            try:
                self._connection.send(message)
            except OSError:
                pass  # the listening thread notices the end of the connection and tells the callers that wait

    def _ask(self, name: str, *args: Any, on_exit: OnExit | None = None) -> Any:
        token = next(self._tokens)
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers[token] = box
        if on_exit is not None:
            self._starting[token] = on_exit
        try:
            self._send(name, token, *args)
            if self._broken:
                raise WorkerStartError(self._broken)
            answer = box.get(timeout=ANSWER_S if self._ready.is_set() else FIRST_ANSWER_S)
        except queue.Empty:
            raise WorkerStartError("the fork server does not answer; restart the kernel") from None
        finally:
            del self._answers[token]
            self._starting.pop(token, None)
        if isinstance(answer, WorkerStartError):
            raise answer
        return answer

    def _listen(self) -> None:
        try:
            while True:
                name, *args = self._connection.recv()
                if name == "ready":
                    self._ready.set()
                elif name == "broken":
                    self._broken = f"the fork server cannot import what it needs: {args[0]}"
                elif name == "exited":
                    pid, _, code, (stdout, stderr), memory = args
                    self._exited(WorkerExit(pid, code, stdout, stderr, memory))
                else:
                    self._answered(*args)
        except (EOFError, OSError):
            pass
        self._end()

    def _answered(self, token: int, answer: Any) -> None:
        on_exit = self._starting.pop(token, None)
        if on_exit is not None:
            with self._lock:
                self._on_exit[answer] = on_exit
        box = self._answers.get(token)
        if box is not None:  # else the start was interrupted and nothing waits for the answer
            box.put(answer)

    def _exited(self, event: WorkerExit) -> None:
        with self._lock:
            on_exit = self._on_exit.pop(event.pid, None)
        if on_exit is not None:
            on_exit(event)

    def _end(self) -> None:
        """Report the server's end. Linux has killed its workers with it; kill what they had started."""
        code = self._process.wait()
        self._stderr.seek(0)
        tail = self._stderr.read().decode("utf-8", "replace").strip()
        self._stderr.close()
        reason = self._broken or f"the fork server ended with exit code {code}"
        self._broken = reason
        error = WorkerStartError(reason, exitcode=code, stderr_tail="\n".join(tail.splitlines()[-20:]))
        for box in list(self._answers.values()):
            box.put(error)
        with self._lock:
            waiting, self._on_exit = self._on_exit, {}
        for pid, on_exit in waiting.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            on_exit(WorkerExit(pid, -signal.SIGKILL))


_shared: list[ForkServer] = []
_shared_lock = threading.Lock()


def shared() -> ForkServer:
    """Return this process's fork server, starting it if needed. Returns at once; the server goes on importing torch."""
    with _shared_lock:
        if not _shared or not _shared[0].alive:
            _shared[:] = [ForkServer()]
        return _shared[0]


def _after_fork() -> None:
    """Forget the server in a forked child of the kernel, which must not speak to its parent's server."""
    _shared.clear()


def available() -> bool:
    """Return whether forking a process that has imported torch is safe on this system."""
    # On macOS, system libraries that torch uses do not survive a fork.
    return hasattr(os, "fork") and sys.platform != "darwin"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
