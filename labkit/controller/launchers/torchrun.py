"""Runs torchrun on this machine, for a pool that is attached to the notebook's own machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from labkit.controller.launch_text import Launch
from labkit.controller.nodes import Nodes
from labkit.errors import WorkerStartError

# The kernel's end is noticed at once here, and nobody comes back.
LINGER_S = 0.5
_END_S = 8.0
_TAIL_LINES = 20


class LocalTorchrun:
    """One torchrun process, and with it one agent.

    Args:
        folder: For its files; removed when the process has ended, by the agent where this process is gone by then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, launch: Launch) -> None:
        """Start torchrun."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command += ["--log-dir", str(self._folder), "-m", "labkit.worker", "--connect", launch.connect]
        command += ["--key-file", launch.key_file, "--linger", str(LINGER_S), "--remove", str(self._folder)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
        )

    def changed(self, nodes: Nodes) -> None:
        """There is one machine, and the reader sits at it."""

    def check(self) -> None:
        """Refuse to wait for a torchrun that has ended.

        Raises:
            WorkerStartError: It has; with the end of its output.
        """
        if self._process is not None and (code := self._process.poll()) is not None:
            self._output.seek(0)
            lines = self._output.read().decode("utf-8", "replace").splitlines()
            raise WorkerStartError("torchrun has ended", exitcode=code, stderr_tail="\n".join(lines[-_TAIL_LINES:]))

    def end(self) -> None:
        """Wait for torchrun to end, which its agent has been told to; at most _END_S, then it is killed."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)
