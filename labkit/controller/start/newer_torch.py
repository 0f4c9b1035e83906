"""The check of a torch that is newer than those labkit was tried with, before the first pool starts.

labkit repairs process groups and models through parts of torch that may change without notice. So such a torch has to pass
:mod:`labkit.worker.mend.self_test` first, in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

from labkit.base.own_python import own_environ, own_python
from labkit.base.tried_versions import TORCH, newer_than
from labkit.errors import WorkerStartError

# As for the fork server's first answer: most of it is `import torch`, which took 26 s on a loaded 2-core machine.
SELF_TEST_S = 180.0

_passed = False


def untried() -> str:
    """Return the version of the installed torch if it is newer than those that were tried, else an empty text."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return version if newer_than(TORCH, version) else ""


def check(stop_if_asked: Callable[[], None]) -> None:
    """Warn once in this process of a torch that was not tried.

    Raises:
        WorkerStartError: It does not pass the self-test.
    """
    global _passed
    version = "" if _passed else untried()
    if not version:
        return
    failure = run_self_test(stop_if_asked)
    if failure:
        raise WorkerStartError(
            f"torch {version} is newer than the versions that labkit was tried with ({TORCH[0]} to {TORCH[-1]}), and labkit's "
            f"self-test fails on it. Install one of those: pip install 'torch<{first_untried()}'",
            stderr_tail=failure,
        )
    _passed = True
    warnings.warn(
        f"torch {version} is newer than the versions that labkit was tried with ({TORCH[0]} to {TORCH[-1]}). labkit's self-test "
        "passes, so it goes on.",
        stacklevel=_level_outside_labkit(),
    )


def run_self_test(stop_if_asked: Callable[[], None]) -> str:
    """Run the self-test in a process of its own. Return the last lines of its output if it failed, else an empty text."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            own_python("-m", "labkit.worker.mend.self_test"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=own_environ(os.environ),
        )
        try:
            deadline = time.monotonic() + SELF_TEST_S
            while process.poll() is None and time.monotonic() < deadline:
                stop_if_asked()
                time.sleep(0.05)
            stop_if_asked()  # the notebook's interrupt reaches that process too, whose end then means nothing
        finally:
            process.kill()
            code = process.wait()
        output.seek(0)
        lines = output.read().splitlines()[-20:]
    return "" if code == 0 else "\n".join(lines) or f"it did not end within {SELF_TEST_S:g} s"


def first_untried() -> str:
    """Return the first version of torch that is newer than those that were tried."""
    major, minor = TORCH[-1].split(".")
    return f"{major}.{int(minor) + 1}"


def _level_outside_labkit() -> int:
    """Return the ``stacklevel`` at which :func:`check` warns about the line that called labkit."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "labkit":
        level, frame = level + 1, frame.f_back
    return level
