"""A guard against leaks of a test: processes, threads, file descriptors, listening sockets, labkit's temporary folders.

It compares counts, because a test may replace things that existed before it: a shared pool that is restarted has new processes
but not more of them. The message names the new ones.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

FORKSERVER = "labkit.worker.start.forkserver"
# Other tests check that everything is gone within two seconds. Here the cores may be busy.
SETTLE_S = 10.0
# The fork server outlives pools on purpose. The test that happens to start it keeps the kernel's ends of its channels
# and the thread that listens to it.
FORKSERVER_FDS = 4
FORKSERVER_THREADS = 1

# Every process below pytest inherits this variable, so that even one that lost its parents is found.
_MARK = "LABKIT_TEST_RUN"
_RUN = uuid.uuid4().hex

# Threads that a library starts once per process and never stops.
_SINGLETON_THREADS = ("TMonitor", "pymonitor", "IPythonHistorySavingThread")
# multiprocessing's own tracker of shared memory: one per process, ended with it. And the children of Chromium, which starts them
# when it likes: what counts is Chromium itself.
_SINGLETON_PROCESSES = ("multiprocessing.resource_tracker", "chromium --type=", "chrome --type=")


@dataclass(frozen=True)
class Holdings:
    """The resources that this test process and its descendants hold at one moment. Keys identify them, values describe them."""

    processes: dict[str, str] = field(default_factory=dict)
    threads: dict[str, str] = field(default_factory=dict)
    descriptors: dict[str, str] = field(default_factory=dict)
    listeners: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    forkservers: dict[int, str] = field(default_factory=dict)


def prepare() -> None:
    """Mark this process, and let libraries open their permanent resources before anything is counted."""
    os.environ[_MARK] = _RUN
    import zmq
    from jupyter_core.utils import ensure_event_loop

    zmq.Context.instance().socket(zmq.PAIR).close()
    ensure_event_loop()


def take_stock() -> Holdings:
    """Count everything once."""
    family = _family()
    forkservers = {process.pid: text for process in family if _is_forkserver(process) for _, text in _describe(process)}
    return Holdings(
        processes={key: text for process in family if process.pid not in forkservers for key, text in _describe(process)},
        threads=_threads(),
        descriptors=_descriptors(),
        listeners=_listeners([psutil.Process(), *(process for process in family if process.pid in forkservers)]),
        folders={str(path): str(path) for path in Path(tempfile.gettempdir()).glob("labkit-*")},
        forkservers=forkservers,
    )


def leaked(before: Holdings, after: Holdings) -> list[str]:
    """One line per kind whose count has grown, naming the new ones."""
    started_one = bool(after.forkservers.keys() - before.forkservers.keys())
    extra_forkservers = len(after.forkservers) > max(1, len(before.forkservers))
    lines = [f"{len(after.forkservers)} fork servers: {'; '.join(after.forkservers.values())}"] if extra_forkservers else []
    for kind, old, new, allowed in (
        ("process", before.processes, after.processes, 0),
        ("thread", before.threads, after.threads, FORKSERVER_THREADS * started_one),
        ("file descriptor", before.descriptors, after.descriptors, FORKSERVER_FDS * started_one),
        ("listening socket", before.listeners, after.listeners, 0),
        ("temporary folder", before.folders, after.folders, 0),
    ):
        surplus = len(new) - len(old) - allowed
        if surplus > 0:
            names = "; ".join(text for key, text in new.items() if key not in old)
            lines.append(f"{surplus} more of kind {kind}: {names}")
    return lines


@contextmanager
def guard(settle_s: float = SETTLE_S) -> Iterator[None]:
    """Fail when more is left at the end than at the start, after up to ``settle_s`` seconds for it to go away."""
    before = take_stock()
    yield
    deadline = time.monotonic() + settle_s
    lines = leaked(before, take_stock())
    while lines and time.monotonic() < deadline:
        # A reference cycle behind a traceback may hold descriptors; that is Python's business, not a leak.
        gc.collect()
        time.sleep(0.05)
        lines = leaked(before, take_stock())
    if lines:
        raise AssertionError(f"left behind {settle_s:g} s after the test:\n" + "\n".join(f"  {line}" for line in lines))


def _family() -> list[psutil.Process]:
    """Every live process that descends from this one, orphans included."""
    me = psutil.Process()
    found = {process.pid: process for process in me.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid != me.pid and process.pid not in found and _is_marked(process):
            found[process.pid] = process
    return [process for process in found.values() if not _is_singleton(process)]


def _is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(_MARK) == _RUN
    except (psutil.Error, OSError):
        return False


def _cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_forkserver(process: psutil.Process) -> bool:
    """Return whether this is a fork server itself; its forks, the ranks, have the same command line."""
    if FORKSERVER not in _cmdline(process):
        return False
    try:
        parent = process.parent()
    except psutil.Error:
        return False
    return parent is None or FORKSERVER not in _cmdline(parent)


def _is_singleton(process: psutil.Process) -> bool:
    return any(name in _cmdline(process) for name in _SINGLETON_PROCESSES)


def _describe(process: psutil.Process) -> Iterator[tuple[str, str]]:
    try:
        with process.oneshot():
            program = _cmdline(process)[:160] or process.name()
            text = f"pid {process.pid} ({process.status()}, child of {process.ppid()}): {program}"
            yield f"{process.pid}@{process.create_time()}", text
    except psutil.Error:
        return


def _threads() -> dict[str, str]:
    return {
        f"{thread.ident}": f"{thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if not thread.name.startswith(_SINGLETON_THREADS)
    }


def _descriptors() -> dict[str, str]:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    found = {}
    for name in os.listdir(folder):
        try:
            target = os.readlink(os.path.join(folder, name)) if folder.startswith("/proc") else "open"
            os.fstat(int(name))
        except OSError:
            continue  # the descriptor of this very listing
        found[f"{name} {target}"] = f"{name} -> {target}"
    return found


def _listeners(processes: list[psutil.Process]) -> dict[str, str]:
    found = {}
    for process in processes:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                where = f"{connection.laddr.ip}:{connection.laddr.port}"
                found[f"{process.pid} {where}"] = f"{where} in pid {process.pid}"
    return found
