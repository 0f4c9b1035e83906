"""What a pool expects of whatever starts its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from labkit.machine import MemoryAtDeath
from labkit.wire.pipes import Rest
from labkit.wire.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker process has ended.

    Attributes:
        pid: Its process id.
        exitcode: As in :attr:`subprocess.Popen.returncode`: negative for a signal.
        stdout: The end of its output, what it had sent already included.
        stderr: The same for stderr.
        memory: What memory was like on its machine then; None where nobody looked.
        cause: Why it counts as ended, where nobody saw it end: its machine is out of reach.
    """

    pid: int
    exitcode: int
    stdout: Rest = field(default_factory=Rest)
    stderr: Rest = field(default_factory=Rest)
    memory: MemoryAtDeath | None = None
    cause: str = ""


OnExit = Callable[[WorkerExit], None]


class Launcher(Protocol):
    """Starts workers on this machine and reports their ends."""

    name: str

    def warm_up(self) -> None:
        """Wait until workers can be started at once; an interrupt meanwhile leaves nothing behind."""
        ...

    def start(self, spec: WorkerSpec, on_exit: OnExit) -> int:
        """Start one worker; returns its pid. ``on_exit`` is called once, from another thread, when it ends."""
        ...

    def kill(self, pid: int) -> None:
        """Kill a worker of this launcher with all that it started. Does nothing when it has ended."""
        ...

    def count_gpus(self) -> int:
        """CUDA devices that workers started now would see."""
        ...
