"""Runs torchrun on this machine, for a pool that is attached to the notebook's own machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from labkit.controller.launch_text import Launch
from labkit.controller.nodes import Nodes
from labkit.errors import WorkerStartError

_END_S = 8.0
_TAIL_LINES = 20
_FAILED = "] failed (exitcode: "  # torchrun's log names the worker that ended


class LocalTorchrun:
    """One torchrun process for each machine, of which there may be several only in play, and with it one agent.

    Args:
        folder: For its files; removed when the process has ended, by the agent where this process is gone by then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        """Make the folder, which the end of an earlier start has removed."""
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def call(self, launch: Launch) -> None:
        """Start torchrun."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        port = _free_port()
        for number in range(launch.num_nodes):
            command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
            command += ["--rdzv-conf", f"is_host={int(number == 0)}", "--log-dir", str(self._folder)]
            command += [*launch.arguments(f"127.0.0.1:{port}"), "--remove", str(self._folder)]
            self._processes.append(self._start(command, _gpus_of(number, launch) if launch.num_nodes > 1 else {}))

    def _start(self, command: list[str], environ: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                **environ,
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
        )

    # Something must have stopped its processes: they have not ended, else the pool would be gone.
    way_back = "It is played here: wake its processes (kill -CONT), or begin from the start with pool.close() and pool.restart()."

    def wait(self) -> None:
        """Nothing is shown."""

    def changed(self, nodes: Nodes) -> None:
        """The reader sits at the machine and need not be told what to run."""

    def check(self) -> None:
        """Refuse to wait for a torchrun that has ended.

        Raises:
            WorkerStartError: It has; with the end of its output.
        """
        for process in self._processes:
            if (code := process.poll()) is not None:
                self._output.seek(0)
                lines = self._output.read().decode("utf-8", "replace").splitlines()
                said = _before_summary(lines)
                raise WorkerStartError("torchrun has ended", exitcode=code, stderr_tail="\n".join(said[-_TAIL_LINES:]))

    @property
    def gone(self) -> bool:
        """Whether a torchrun has ended before its pool was closed."""
        return any(process.poll() is not None for process in self._processes)

    def end(self) -> None:
        """Wait for torchrun to end, which its agents have been told to; at most _END_S, then it is killed."""
        processes, self._processes = self._processes, []
        deadline = time.monotonic() + _END_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # Its agent has a process group of its own. With the agent end the fork server and the ranks.
                for below in psutil.Process(process.pid).children():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        below.kill()
                process.kill()
                process.wait()
        if processes:
            self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _before_summary(lines: list[str]) -> list[str]:
    """What came before torchrun's own words on a failed agent, which are long and give no cause; all, where that is nothing."""
    summary = next((number for number, line in enumerate(lines) if _FAILED in line), 0)
    return lines[:summary] or lines


def _gpus_of(number: int, launch: Launch) -> dict[str, str]:
    """Each machine in play has GPUs of its own, as far as there are any."""
    per_node = launch.workers_per_node
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else [str(index) for index in range(launch.num_nodes * per_node)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number * per_node : (number + 1) * per_node])}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
