"""A real Jupyter kernel that is restarted, killed or shut down takes its ranks with it, whatever they do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from labkit.controller.start.launchers import fork_server
from tests.process.patience import ORPHANS_S, survivors, until

pytestmark = [
    pytest.mark.skipif(not fork_server.available(), reason="the fork server is the guardian; there is none on this system"),
    pytest.mark.timeout(300),  # three times a kernel whose fork server imports torch
]

START = """
%load_ext labkit
import json, labkit
from labkit.controller.start.launchers import fork_server
pool = labkit.WorkerPool(2, device="cpu")
pool.push(marks=marks)
print(json.dumps([pool._life.runner.members._world._directory, fork_server.shared().pid, *pool.pids.values()]))
"""
WORK = """
%%spmd
import os, torch.distributed as dist
open(os.path.join(marks, str(rank)), "w").close()
if rank == 0:
    dist.barrier()
while True:
    pass
"""
LIMIT_S = 120.0


class Kernel:
    """A Jupyter kernel with a pool of two ranks."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": os.getcwd()})
        self._marks = folder
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def start_pool(self) -> tuple[list[psutil.Process], Path]:
        """Start a pool; return the kernel with all processes below it, and the pool's directory."""
        self.client.wait_for_ready(timeout=LIMIT_S)
        told: list[Any] = json.loads(self.text_of(f"marks = {str(self._marks)!r}\n" + START))
        kernel = psutil.Process(told[1]).parent()
        assert kernel is not None
        found = [kernel, *kernel.children(recursive=True)]
        assert set(told[1:]) < {process.pid for process in found}
        assert Path(told[0]).is_dir()
        return found, Path(told[0])

    def text_of(self, cell: str) -> str:
        """Run a cell and return its printed output."""
        parts: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                parts.append(message["content"]["text"])

        reply = self.client.execute_interactive(cell, timeout=LIMIT_S, output_hook=hear)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(parts)

    def go_to_work(self) -> None:
        """Make one rank wait in a collective for the other, which computes."""
        for mark in self._marks.iterdir():
            mark.unlink()
        # Otherwise the kernel aborts cells that arrive just after the error with which this cell ends.
        self._work = self.client.execute(WORK, stop_on_error=False)
        until(lambda: len(list(self._marks.iterdir())) == 2, "the ranks are at work", 60)

    def interrupt(self) -> str:
        """Interrupt the work and return the name of the error with which its cell ended."""
        self.manager.interrupt_kernel()
        while (reply := self.client.get_shell_msg(timeout=LIMIT_S))["parent_header"]["msg_id"] != self._work:
            pass
        return str(reply["content"]["ename"])


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.client.stop_channels()
    if kernel.manager.is_alive():
        kernel.manager.shutdown_kernel(now=True)
    kernel.manager.cleanup_resources()
    kernel.client.context.term()


def gone(processes: list[psutil.Process], directory: Path) -> None:
    until(lambda: not survivors(processes), "all processes have ended", ORPHANS_S)
    until(lambda: not directory.exists(), "the pool's directory is removed", ORPHANS_S)


def test_case_13_restart_and_shutdown_of_a_kernel_leave_nothing(kernel: Kernel) -> None:
    found, directory = kernel.start_pool()
    kernel.go_to_work()
    kernel.manager.restart_kernel(now=True)
    gone(found, directory)

    found, directory = kernel.start_pool()
    kernel.go_to_work()
    assert kernel.interrupt() == "RunInterrupted"
    assert kernel.text_of("print(pool.run(lambda: 1).same())") == "1\n"
    kernel.manager.shutdown_kernel()
    gone(found, directory)
