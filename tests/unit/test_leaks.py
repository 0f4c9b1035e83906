"""The leak guard reports leaks, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests import leaks


@pytest.fixture
def cleanup() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _child(stack: contextlib.ExitStack) -> str:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stack.callback(child.wait)
    stack.callback(child.kill)
    return str(child.pid)


def _orphan(stack: contextlib.ExitStack) -> str:
    program = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    # The grandchild inherits stdout, so its pid is read as a line and not up to the end of the file.
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
    stack.callback(os.kill, pid, signal.SIGKILL)
    return str(pid)


def _thread(stack: contextlib.ExitStack) -> str:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    thread.start()
    stack.callback(thread.join)
    stack.callback(done.set)
    return "forgotten"


def _descriptor(stack: contextlib.ExitStack) -> str:
    stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
    return os.devnull


def _listener(stack: contextlib.ExitStack) -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    stack.enter_context(listener)
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _folder(stack: contextlib.ExitStack) -> str:
    return stack.enter_context(tempfile.TemporaryDirectory(prefix="labkit-"))


@pytest.mark.parametrize("leak", [_child, _orphan, _thread, _descriptor, _listener, _folder])
def test_what_is_left_behind_fails_the_test_and_is_named(
    leak: Callable[[contextlib.ExitStack], str], cleanup: contextlib.ExitStack
) -> None:
    guard = leaks.guard(settle_s=0.1)
    guard.__enter__()
    name = leak(cleanup)
    with pytest.raises(AssertionError) as caught:
        guard.__exit__(None, None, None)
    assert name in str(caught.value)


def test_what_goes_away_in_time_is_no_leak() -> None:
    with leaks.guard(settle_s=20):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
        waiter = threading.Thread(target=child.wait)
        waiter.start()
    waiter.join()


def test_a_replaced_process_is_no_leak(cleanup: contextlib.ExitStack) -> None:
    old = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    cleanup.callback(old.wait)
    with leaks.guard(settle_s=5):
        _child(cleanup)
        old.kill()
        old.wait()


def test_a_helper_that_chromium_starts_is_no_leak(cleanup: contextlib.ExitStack) -> None:
    before = leaks.take_stock()
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "/usr/lib/chromium/chromium", "--type=utility"])
    cleanup.callback(helper.wait)
    cleanup.callback(helper.kill)
    assert leaks.leaked(before, leaks.take_stock()) == []


def test_the_fork_server_may_stay_but_its_ranks_may_not(cleanup: contextlib.ExitStack) -> None:
    program = textwrap.dedent(
        """
        import os, sys, time
        if os.fork() == 0:
            time.sleep(60)
        print("forked", flush=True)
        time.sleep(60)
        """
    )
    before = leaks.take_stock()
    server = subprocess.Popen([sys.executable, "-c", program, leaks.FORKSERVER], stdout=subprocess.PIPE, text=True)
    cleanup.enter_context(server)
    cleanup.callback(server.kill)
    assert server.stdout.readline() == "forked\n"
    (rank,) = psutil.Process(server.pid).children()
    try:
        # Another test may have left a fork server; then this is a second one, which gives another line.
        (line,) = (line for line in leaks.leaked(before, leaks.take_stock()) if "fork servers" not in line)
        assert f"pid {rank.pid}" in line
        assert f"pid {server.pid} " not in line
    finally:
        rank.kill()
    deadline = time.monotonic() + 10
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_second_fork_server_is_a_leak(cleanup: contextlib.ExitStack) -> None:
    before = leaks.take_stock()
    pids = []
    for _ in range(2):
        server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", leaks.FORKSERVER])
        cleanup.callback(server.wait)
        cleanup.callback(server.kill)
        pids.append(server.pid)
    deadline = time.monotonic() + 20
    while not set(pids) <= (after := leaks.take_stock()).forkservers.keys():  # before exec a process has its parent's command line
        assert time.monotonic() < deadline
    (line,) = (line for line in leaks.leaked(before, after) if line.startswith(f"{len(after.forkservers)} fork servers"))
    assert all(f"pid {pid} (" in line and f"child of {os.getpid()}" in line for pid in pids)
