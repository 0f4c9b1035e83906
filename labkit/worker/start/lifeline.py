"""The end of a process that serves a controller, together with that controller."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

LOOK_S = 0.25

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Ask Linux to kill this process when the fork server dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants that have lost their own parent, if the system offers it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_group(pid: int) -> None:
    """Kill a child with its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)  # just after its fork a child is not yet in its own group


def child_pids() -> list[int]:
    """Return the children of this process; empty if the system does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


@contextlib.contextmanager
def ending_with_controller(connection: Connection, clean_up: Callable[[], None]) -> Iterator[None]:
    """End this process at once if its controller ends during the block. For imports, which take seconds."""
    parent = os.getppid()
    poller = select.poll()
    poller.register(connection.fileno(), 0)  # reports a hang-up and nothing else

    def look(number: int, frame: object) -> None:
        if os.getppid() != parent or poller.poll(0):
            clean_up()
            os._exit(0)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
