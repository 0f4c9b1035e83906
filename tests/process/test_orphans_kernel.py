"""However the kernel ends, and whatever its ranks do, no process or file of it is left two seconds later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit.controller.start.launchers import fork_server
from tests.matrix import matrix
from tests.process.patience import ORPHANS_S, survivors, until

pytestmark = [
    pytest.mark.skipif(not fork_server.available(), reason="the fork server is the guardian; there is none on this system"),
    pytest.mark.timeout(300),  # each kernel imports torch once, all of them at the same time
]

SCRIPT = Path(__file__).with_name("orphan_kernel.py")
# For each kernel: its end, its ranks' work at that time, and whether its first start was interrupted.
ENDS = {
    "SIGKILL, idle": (signal.SIGKILL, "idle", ""),
    "SIGKILL, at work": (signal.SIGKILL, "at work", ""),
    "SIGTERM, at work": (signal.SIGTERM, "at work", ""),
    "segfault, at work": ("segfault", "at work", ""),
    "end of the script, at work": ("end", "at work", "interrupted"),
    "sys.exit, at work": ("sys.exit", "at work", ""),
}


@dataclass
class Kernel:
    """A running kernel process.

    Attributes:
        process: The process.
        marks: Folder in which its ranks say that they are at work.
        told: The processes and files that it has started, once its pool is ready.
    """

    process: subprocess.Popen[str]
    marks: Path
    told: dict[str, Any] = field(default_factory=dict)

    def await_pool(self) -> None:
        """Wait until its pool is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the kernel ended with {self.process.wait()}"
        self.told = json.loads(line)

    def tell(self, word: str) -> None:
        """Send it a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


def start_kernel(folder: Path, first: str) -> Kernel:
    marks = folder / "marks"
    marks.mkdir(parents=True)
    pipe = subprocess.PIPE
    # The import path instead of PYTHONPATH: modules that are not installed must be found, and the ranks inherit the environment.
    code = f"import runpy, sys; sys.path[:] = {sys.path!r}; sys.argv = {[str(SCRIPT), str(marks), first]!r}; "
    code += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=stderr, text=True)
    return Kernel(process, marks)


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Kernel]]:
    """A kernel for each test that runs, all started together, because each spends its time on importing torch."""
    names = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    started = {
        name: start_kernel(tmp_path_factory.mktemp("kernel"), first) for name, (_, _, first) in ENDS.items() if name in names
    }
    for kernel in started.values():
        kernel.await_pool()
    yield started
    for kernel in started.values():
        kernel.process.kill()
        kernel.process.communicate()


def in_its_state(rank: int, pid: int) -> bool:
    """Return whether a rank has begun its work after its mark: in Python it uses the processor, elsewhere it sleeps."""
    running = psutil.Process(pid).status() == psutil.STATUS_RUNNING
    return running if rank == 1 else not running


@pytest.mark.parametrize(
    "name",
    [
        *matrix("SIGKILL, at work", "SIGKILL, idle", "SIGTERM, at work", "sys.exit, at work"),
        "segfault, at work",
        "end of the script, at work",
    ],
)
def test_case_13_nothing_is_left_of_a_kernel_that_ends(kernels: dict[str, Kernel], name: str) -> None:
    end, state, _ = ENDS[name]
    kernel = kernels[name]
    told = kernel.told
    everything = [psutil.Process(kernel.process.pid), *psutil.Process(kernel.process.pid).children(recursive=True)]
    pids = {found.pid for found in everything}
    assert {told["server"], *told["ranks"], *told["children"]} < pids
    # Four ranks, each with a session leader and two workers of a data loader; with them the kernel and the fork server. A start
    # that was interrupted has left nothing.
    assert len(psutil.Process(told["server"]).children()) == 4
    assert sum(len(psutil.Process(pid).children()) for pid in told["ranks"]) == 12
    assert Path(told["directory"]).is_dir()
    if state == "at work":
        kernel.tell("go to work")
        until(lambda: len(list(kernel.marks.iterdir())) == 4, "all ranks are at work", 60)
        until(lambda: all(in_its_state(rank, pid) for rank, pid in enumerate(told["ranks"])), "they have come there")
    began = time.monotonic()
    if isinstance(end, signal.Signals):
        kernel.process.send_signal(end)
    else:
        kernel.tell(end)
    kernel.process.wait(ORPHANS_S)
    until(lambda: not survivors(everything), f"all processes have ended {survivors(everything)}", ORPHANS_S)
    until(lambda: not Path(told["directory"]).exists(), "the pool's directory is removed", ORPHANS_S)
    assert time.monotonic() - began < ORPHANS_S


def test_kernel_that_dies_while_its_fork_server_still_imports_leaves_nothing(tmp_path: Path) -> None:
    kernel = start_kernel(tmp_path, "")
    children = psutil.Process(kernel.process.pid).children
    until(children, "the fork server is there", 60)
    server = children()
    kernel.process.kill()
    kernel.process.communicate()
    until(lambda: not survivors(server), "the fork server has ended", ORPHANS_S)
    assert os.listdir(tmp_path / "marks") == []
