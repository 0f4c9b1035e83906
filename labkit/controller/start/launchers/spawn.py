"""A launcher that starts each worker as a new Python process: slower, for systems where forking is not safe."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass

from labkit.base.own_python import own_environ, own_python
from labkit.controller.start.launchers.launcher import OnExit, WorkerExit
from labkit.wire.pipes import Kept, make_pipes, take_rest
from labkit.wire.spec import WorkerSpec


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    read_fds: tuple[int, int]
    kept: Kept
    lifeline: int


class SpawnLauncher:
    """A launcher that starts workers with ``python -m labkit.worker.start.spawned``."""

    name = "spawn"

    def __init__(self) -> None:
        self._running: dict[int, _Running] = {}

    def warm_up(self) -> None:
        """Do nothing: this launcher keeps no process warm; see :class:`Launcher`."""

    def start(self, spec: WorkerSpec, on_exit: OnExit) -> int:
        """Start one worker; see :class:`Launcher`."""
        read_fds, write_fds = make_pipes()
        spec_read, spec_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        kept_file = tempfile.TemporaryFile()  # noqa: SIM115
        kept_file.truncate(Kept.SIZE_BYTES)
        command = own_python("-m", "labkit.worker.start.spawned", "--spec-fd", str(spec_read), "--kept-fd", str(kept_file.fileno()))
        command += ["--lifeline-fd", str(lifeline_read), "--read-fds", *map(str, read_fds)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=write_fds[0],
            stderr=write_fds[1],
            pass_fds=[spec_read, lifeline_read, kept_file.fileno(), *read_fds],
            start_new_session=True,
            env=own_environ({"OMP_NUM_THREADS": "1", **spec.environ}),
        )
        for fd in (*write_fds, spec_read, lifeline_read):
            os.close(fd)
        with os.fdopen(spec_write, "wb") as file:
            pickle.dump(spec, file)
        with kept_file:
            self._running[process.pid] = _Running(process, read_fds, Kept(kept_file.fileno()), lifeline_write)
        threading.Thread(target=self._wait, args=(process.pid, on_exit), name="labkit-spawn", daemon=True).start()
        return process.pid

    def _wait(self, pid: int, on_exit: OnExit) -> None:
        running = self._running[pid]
        code = running.process.wait()
        _kill_group(pid)
        del self._running[pid]
        stdout, stderr = take_rest(running.read_fds, running.kept)
        os.close(running.lifeline)
        on_exit(WorkerExit(pid, code, stdout, stderr))

    def kill(self, pid: int) -> None:
        """Kill a worker; see :class:`Launcher`."""
        if pid in self._running:
            _kill_group(pid)

    def count_gpus(self) -> int:
        """Return the number of CUDA devices, asked in a separate process; see :class:`Launcher`."""
        code = "import torch; print(torch.cuda.device_count())"
        result = subprocess.run(
            own_python("-c", code), env=own_environ(os.environ), capture_output=True, text=True, check=False, timeout=120, cwd="/"
        )
        return int(result.stdout.strip() or 0) if result.returncode == 0 else 0


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
