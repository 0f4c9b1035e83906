"""Agents on this machine, for a pool that is attached to the notebook's own machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from labkit.base.limits import LIMITS
from labkit.base.own_python import own_environ
from labkit.controller.machines.launch_text import Launch
from labkit.controller.machines.nodes import Nodes
from labkit.errors import WorkerStartError

_TAIL_LINES = 20


class LocalAgents:
    """One agent for each machine; if there are several machines, they are simulated on this one.

    Args:
        folder: For its files; removed when the agents have ended, or by an agent if this process is gone by then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        """Make the folder, which the end of an earlier start has removed.

        Raises:
            WorkerStartError: Something else has taken its place meanwhile.
        """
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise WorkerStartError(
                f"{self._folder}, where the pool's key belongs, is not this user's own any more. Close the pool and make a new one."
            )

    def call(self, launch: Launch) -> None:
        """Start the agents."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        for number in range(launch.num_nodes):
            # The rank is given: a scheduler's variables in this environment speak of the notebook's own machine.
            command = [sys.executable, *launch.arguments(), "--node-rank", str(number), "--remove", str(self._folder)]
            self._processes.append(self._start(command, _gpus_of(number, launch) if launch.num_nodes > 1 else {}))

    def _start(self, command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=own_environ({"OMP_NUM_THREADS": "1", **os.environ, **environ}),
        )

    # Something must have stopped its processes: they have not ended, else the pool would be gone.
    way_back = "It is played here: wake its processes (kill -CONT), or begin from the start with pool.close() and pool.restart()."

    def wait(self) -> None:
        """Do nothing: there is no table to show."""

    def changed(self, nodes: Nodes) -> None:
        """Do nothing: the reader need not run any command, so none is shown."""

    def check(self) -> None:
        """Raise an error if an agent has ended.

        Raises:
            WorkerStartError: An agent has ended; the error holds the last lines that the agents wrote.
        """
        for process in self._processes:
            if (code := process.poll()) is not None:
                self._output.seek(0)
                lines = self._output.read().decode("utf-8", "replace").splitlines()
                raise WorkerStartError("its agent has ended", exitcode=code, stderr_tail="\n".join(lines[-_TAIL_LINES:]))

    @property
    def gone(self) -> bool:
        """True if an agent has ended before its pool was closed."""
        return any(process.poll() is not None for process in self._processes)

    def end(self) -> None:
        """Wait at most ``agents_end_s`` for the agents to end, as they were told to. Then kill those that are left."""
        processes, self._processes = self._processes, []
        deadline = time.monotonic() + LIMITS.agents_end_s
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if processes:
            self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _gpus_of(number: int, launch: Launch) -> dict[str, str]:
    """Return the environment that gives each simulated machine GPUs of its own, as far as there are enough."""
    per_node = launch.workers_per_node
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else [str(index) for index in range(launch.num_nodes * per_node)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number * per_node : (number + 1) * per_node])}
