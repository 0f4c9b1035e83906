"""The fork server: one process that has imported torch and forks workers from that state.

Importing torch takes seconds, forking a process that has imported it takes milliseconds. Forking after ``import torch`` is safe
because this process has one thread, runs no operator and never touches an accelerator.

It is also the workers' guardian. It reports each death at once, with the worker's last output. When its controller ends, for
whatever reason, it kills all workers and all processes that they have started, and then ends.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from labkit.wire.pipes import Kept, make_pipes, redirect, take_rest
from labkit.wire.spec import WorkerSpec
from labkit.worker.start import meeting_store
from labkit.worker.start.environment import INLINE_FIGURES, draw_anew, enter
from labkit.worker.start.imports import import_machinery
from labkit.worker.start.lifeline import adopt_orphans, child_pids, die_with_parent, ending_with_controller, kill_group
from labkit.worker.start.oom_kills import OomKills

# Imported while there are no requests and no worker lives: the report of a death must not wait for an import. The inline backend
# itself is not here: it hooks into the shell of the process that imports it, and this process has none.
IDLE_IMPORTS = ("matplotlib.pyplot", "matplotlib.backends.backend_agg")

Work = Callable[[tuple[int, int], Kept], None]


@dataclass
class _Child:
    pid: int
    rank: int
    directory: str
    read_fds: tuple[int, int]
    kept: Kept


@dataclass
class Server:
    """The server's state.

    Attributes:
        connection: The connection to the controller; its end means that the controller is gone.
        children: Living workers by pid, and the store's process.
        directories: Directories of pools, removed if the controller ends without removing them.
    """

    connection: Connection
    children: dict[int, _Child] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    _oom_kills: OomKills = field(default_factory=OomKills)

    def serve(self) -> None:
        """Answer requests until the controller ends."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        parent = os.getppid()
        idle_imports = list(IDLE_IMPORTS)
        poller = select.poll()
        poller.register(self.connection.fileno(), select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        # A child that the controller's process forked could hold the connection open, so the parent is watched as well.
        while os.getppid() == parent:
            idle = all(child.rank == meeting_store.RANK for child in self.children.values())
            ready = {fd for fd, _ in poller.poll(20 if idle_imports and idle else 500)}
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    while os.read(wake_read, 4096):
                        pass
            self.reap()
            if self.connection.fileno() in ready:
                try:
                    request = self.connection.recv()
                except (EOFError, OSError):
                    break
                if not self.handle(request):
                    break
            elif not ready and idle_imports and idle:
                # A worker can do without, and says itself why where its cell cannot.
                with contextlib.suppress(Exception), ending_with_controller(self.connection, self.end):
                    importlib.import_module(idle_imports.pop(0))
        self.end()

    def handle(self, request: tuple[Any, ...]) -> bool:
        """Answer one request. Return False to end the server."""
        name, *args = request
        if name == "start":
            token, spec = args
            self.connection.send(("started", token, self.start(spec)))
        elif name == "open_store":
            self.connection.send(("store_opened", *self.open_store(args[0])))
        elif name == "kill":
            (pid,) = args
            if pid in self.children:
                kill_group(pid)
        elif name == "directory":
            self.directories.add(args[0])
        elif name == "forget":
            self.forget(args[0])
        elif name == "are you there":
            self.connection.send(("here", args[0], True))
        elif name == "count_gpus":
            token, environ = args
            self.connection.send(("counted", token, count_gpus(environ)))
        else:
            return False
        return True

    def start(self, spec: WorkerSpec) -> int:
        """Fork one worker and return its pid."""
        return self._fork(spec.rank, spec.directory, functools.partial(_serve_rank, spec))

    def open_store(self, host: str) -> tuple[str, str]:
        """Fork the store's process. Return its address, or an empty address and the reason."""
        try:
            listener, address = meeting_store.listen(host)
        except OSError as error:
            return "", f"it cannot listen on {host}: {error.strerror}"
        with listener:
            self._fork(meeting_store.RANK, "", lambda *_: meeting_store.serve(listener))
        return address, ""

    def _fork(self, rank: int, directory: str, work: Work) -> int:
        read_fds, write_fds = make_pipes()
        kept = Kept()
        # Otherwise a worker's first garbage collection writes to every object of torch, which copies 65 MiB of pages.
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            self._become(work, read_fds, write_fds, kept)
        for fd in write_fds:
            os.close(fd)
        self.children[pid] = _Child(pid, rank, directory, read_fds, kept)
        return pid

    def forget(self, directory: str) -> None:
        """Forget a closed pool. Also kill workers whose start was interrupted before their pid was reported."""
        self.directories.discard(directory)
        for child in self.children.values():
            if child.directory == directory:
                kill_group(child.pid)

    def _become(self, work: Work, read_fds: tuple[int, int], write_fds: tuple[int, int], kept: Kept) -> None:
        """Run the child's side of the fork. Never returns."""
        code = 1
        try:
            server = os.getppid()
            os.setsid()
            die_with_parent()
            adopt_orphans()
            if os.getppid() != server:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.connection.close()
            for sibling in self.children.values():
                for fd in sibling.read_fds:
                    os.close(fd)
                sibling.kept.close()
            redirect(write_fds)
            work(read_fds, kept)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            # Use os._exit: the interpreter's own shutdown belongs to the fork server and would run its exit handlers twice.
            os._exit(code)

    def reap(self) -> None:
        """Report the workers that have ended, with their last output, and end the processes that they left running."""
        # WNOWAIT keeps the pid, and therefore its process group, ours until the group has been killed.
        dead = [pid for pid in self.children if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None]
        self._oom_kills.look(self.children.keys() - dead)
        for pid in dead:
            child = self.children[pid]
            kill_group(pid)
            _, status, usage = os.wait4(pid, 0)
            del self.children[pid]
            rests = take_rest(child.read_fds, child.kept)
            with contextlib.suppress(OSError):
                code, peak = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024  # Linux counts KiB
                memory = self._oom_kills.at_death(pid, peak, by_sigkill=code == -signal.SIGKILL)
                self.connection.send(("exited", pid, child.rank, code, rests, memory))
        self._end_adopted()

    def _end_adopted(self) -> None:
        """Kill and collect processes that dead workers have left. Living workers adopt their orphans themselves."""
        for pid in child_pids():
            if pid not in self.children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def end(self) -> None:
        """Kill every worker with all its descendants, and remove the pools' directories."""
        deadline = time.monotonic() + 5.0
        for pid in self.children:
            kill_group(pid)
        while (pids := child_pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


def _serve_rank(spec: WorkerSpec, read_fds: tuple[int, int], kept: Kept) -> None:
    enter(spec)
    draw_anew()
    from labkit.worker.run.loop import main

    main(spec, read_fds, kept)


def count_gpus(environ: dict[str, str]) -> int:
    """Count the CUDA devices visible under ``environ``, in a throw-away child: counting would bind this process to the driver."""
    import torch

    if torch.version.cuda is None:
        return 0
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0
        try:
            os.environ.clear()
            os.environ.update(environ)
            count = torch.cuda.device_count()
        finally:
            os.write(write, str(count).encode())
            os._exit(0)
    os.close(write)
    text = os.read(read, 16)
    os.close(read)
    os.waitpid(pid, 0)
    return int(text or b"0")


def main() -> None:
    """Run the fork server: ``python -m labkit.worker.start.forkserver --fd N``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = Connection(parser.parse_args().fd)
    # The notebook's interrupt goes to its whole process group, and the controller passes it on in its own way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    # What is imported here may read files from the working directory, as matplotlib reads matplotlibrc, and others may write there.
    os.chdir("/")
    # Without this variable matplotlib would choose a backend that shows nothing.
    os.environ.setdefault("MPLBACKEND", INLINE_FIGURES)
    started = time.monotonic()
    try:
        with ending_with_controller(connection, lambda: None):
            import_machinery()
    except BaseException as error:
        connection.send(("broken", f"{type(error).__name__}: {error}", traceback.format_exc()))
        raise
    gc.collect()
    connection.send(("ready", time.monotonic() - started))
    Server(connection).serve()


if __name__ == "__main__":
    main()
