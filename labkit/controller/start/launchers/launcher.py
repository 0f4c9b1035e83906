"""The interface between a pool and the ways to start its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from labkit.base.machine import MemoryAtDeath
from labkit.wire.pipes import Rest
from labkit.wire.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The end of a worker process.

    Attributes:
        pid: Its process id.
        exitcode: As in :attr:`subprocess.Popen.returncode`: negative for a signal.
        stdout: The end of its output, including what it had already sent.
        stderr: The same for stderr.
        memory: The memory of its machine at that time; None if it was not measured.
        cause: Why it counts as ended although its end was not observed: its machine is out of reach.
    """

    pid: int
    exitcode: int
    stdout: Rest = field(default_factory=Rest)
    stderr: Rest = field(default_factory=Rest)
    memory: MemoryAtDeath | None = None
    cause: str = ""


OnExit = Callable[[WorkerExit], None]


class Launcher(Protocol):
    """A way to start workers on this machine and to report when they end."""

    name: str

    def warm_up(self) -> None:
        """Wait until workers can be started at once. An interrupt meanwhile leaves nothing behind."""
        ...

    def start(self, spec: WorkerSpec, on_exit: OnExit) -> int:
        """Start one worker and return its pid. When it ends, ``on_exit`` is called once, from another thread."""
        ...

    def kill(self, pid: int) -> None:
        """Kill a worker of this launcher with all processes it has started. Do nothing if it has ended."""
        ...

    def count_gpus(self) -> int:
        """Return the number of CUDA devices that workers started now would see."""
        ...
