"""Planning in a child process, so that the caller's process group, modules and memory are not affected."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from typing import IO

import cloudpickle

from labkit.base.own_python import own_environ, own_python
from labkit.errors import LabkitError
from labkit.plan.records import JobError, Plan, TrainingJob

_LAST_LINES = 12


class PlanningFailedError(LabkitError, RuntimeError):
    """The planning process ended without a plan because of a bug in labkit, an unsupported torch, or lack of memory."""


def make_plan(job: TrainingJob, *, timeout_s: float | None = None) -> Plan:
    """Plan a job: bytes on every rank, traffic of a step, checkpoint.

    Args:
        job: The job.
        timeout_s: The time limit in seconds; none by default.

    Returns:
        The plan.

    Raises:
        JobError: The job cannot be planned; the message says what to change.
        PlanningFailedError: The process ended without a plan.
        TimeoutError: It took longer than ``timeout_s`` seconds.

    Ranks: controller or local. It starts a process that ends before this returns, or if this process dies.
    Blocks: some seconds for the course's model, longer for a model with many layers; see `labkit.plan.Plan.seconds`.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            own_python("-m", "labkit.plan.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=own_environ({**os.environ, "OMP_NUM_THREADS": "1"}),
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout_s or 0, end)
        try:
            if timeout_s is not None:
                timer.start()
            answer = _ask(process, job)
        finally:
            timer.cancel()
            process.kill()
            process.communicate()
        if late.is_set():
            raise TimeoutError(f"planning did not end within {timeout_s:g} s. Plan fewer ranks or layers, or allow more time.")
        if not answer:
            raise PlanningFailedError(f"the planning process ended without a plan (exit code {process.returncode}):\n{_tail(log)}")
    found = pickle.loads(answer)
    if isinstance(found, str):
        raise JobError(found)
    assert isinstance(found, Plan)
    return found


def _ask(process: subprocess.Popen[bytes], job: TrainingJob) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # Keep stdin open: the child ends when it closes, which also happens when this process dies.
        process.stdin.write(pickle.dumps(sys.path) + cloudpickle.dumps(job))
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.read()


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
