"""One start of a pool's ranks on this machine: their processes, their wire, and the places where they meet."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from labkit.base import places, torch_caches
from labkit.controller.start import pool_plan
from labkit.controller.start.launchers.fork_server import ForkServer
from labkit.controller.start.launchers.launcher import Launcher, OnExit
from labkit.controller.start.pool_plan import PoolPlan
from labkit.wire.messages import FromWorker, GroupSpec, ToControl, ToMain
from labkit.wire.spec import WorkerSpec
from labkit.wire.transport import Channel, ControllerWire, Keys


class Wire(Protocol):
    """The connection between a pool and its ranks; see :class:`labkit.wire.transport.ControllerWire`."""

    def send(self, ranks: Sequence[int], channel: Channel, message: ToMain | ToControl, frames: Sequence[Any] = ()) -> None:
        """Send one message to several ranks."""

    def receive(self, timeout_s: float) -> list[tuple[FromWorker, list[bytes]]]:
        """Wait for messages."""

    def wake(self) -> None:
        """Make :meth:`receive` return. Safe from signal handlers and threads."""


class World(Protocol):
    """The part of a world that a pool's members need."""

    @property
    def wire(self) -> Wire:
        """The connection to the ranks."""

    @property
    def share_memory(self) -> bool:
        """True if large buffers reach the ranks as memory files."""

    @property
    def places(self) -> Mapping[int, str]:
        """The machine of each rank, if there is more than one machine."""

    def start(self, rank: int, group: GroupSpec, on_exit: OnExit, *, joining: bool) -> int:
        """Start the process of one rank and return a number for :meth:`kill`. ``on_exit`` is called once, from any thread."""

    def kill(self, handle: int) -> None:
        """Kill a process that was started, with all processes it has started. Do nothing if it has ended."""

    def group(self, generation: int) -> GroupSpec:
        """Return the place where the ranks meet to form the groups of a generation."""

    def look(self) -> None:
        """Record what has happened while nothing waited for messages."""

    def close(self) -> None:
        """Clean up after every process has ended."""


class Site(Protocol):
    """The place where a pool starts its ranks, across all its restarts."""

    def prepare(self, timeout_s: float, stop_if_asked: Callable[[], None]) -> None:
        """Wait until ranks can be started at once.

        Raises:
            WorkerStartError: Ranks cannot be started.
        """

    @property
    def plan(self) -> PoolPlan:
        """The ranks to start."""

    def open_world(self) -> World:
        """Prepare for new ranks."""

    @property
    def gone(self) -> bool:
        """True if the processes that start ranks there have ended. Then no rank lives, and only a complete restart helps."""

    def leave(self) -> None:
        """Clean up: the pool is closed."""


# Defaults for the ranks' environment, used unless the reader has set the variables.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Diagnosis reads the flight recorder; on CUDA torch keeps one only if this is set before the group exists.
    "TORCH_FR_BUFFER_SIZE": "256",
    # NCCL's monitor ends a process whose collectives it finds stuck, and writes pages about groups that were aborted.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}


class LocalSite:
    """This machine, and the launcher that starts processes on it.

    Args:
        plan: The ranks to start.
    """

    gone = False  # a fork server that has ended is replaced automatically

    def __init__(self, plan: PoolPlan) -> None:
        self.plan = plan

    def prepare(self, timeout_s: float, stop_if_asked: Callable[[], None]) -> None:
        """Wait until the fork server has imported torch; see :class:`Site`."""
        self._launcher = pool_plan.launcher()  # each time: the fork server of the last start may have died
        self._launcher.warm_up()

    def open_world(self) -> World:
        """Make a directory and a wire; see :class:`Site`."""
        return LocalWorld(self.plan, self._launcher)

    def leave(self) -> None:
        """Do nothing: the fork server stays for the next pool; see :class:`Site`."""


class LocalWorld:
    """Ranks on this machine.

    Args:
        plan: The pool to start.
        launcher: The launcher that starts the processes.
    """

    share_memory = True
    places: Mapping[int, str] = MappingProxyType({})

    def __init__(self, plan: PoolPlan, launcher: Launcher) -> None:
        self._plan, self._launcher = plan, launcher
        self._directory = self._make_directory()
        self.wire = ControllerWire(self._directory, Keys.generate())

    def _make_directory(self) -> str:
        """Make the pool's private directory (mode 0700), for its sockets and the ranks' meeting places."""
        directory = places.new_temporary("labkit-", longest=places.FOR_SOCKETS)
        if isinstance(self._launcher, ForkServer):
            self._launcher.guard_directory(directory)
        return directory

    def start(self, rank: int, group: GroupSpec, on_exit: OnExit, *, joining: bool) -> int:
        """Start the process of one rank; see :class:`World`."""
        return self._launcher.start(self._spec(rank, group, joining), on_exit)

    def _spec(self, rank: int, group: GroupSpec, joining: bool) -> WorkerSpec:
        defaults = ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        return WorkerSpec(
            rank=rank,
            local_rank=rank,
            local_world_size=self._plan.world_size,
            device=self._plan.device,
            endpoint=self.wire.endpoint,
            group=group,
            directory=self._directory,
            environ=torch_caches.private(defaults | dict(os.environ)),
            cwd=os.getcwd(),
            sys_path=tuple(path or os.getcwd() for path in sys.path),
            joining=joining,
            num_gpus=self._plan.num_gpus,
        )

    def kill(self, handle: int) -> None:
        """Kill a process; see :class:`World`."""
        self._launcher.kill(handle)

    def group(self, generation: int) -> GroupSpec:
        """Return the place where the ranks meet; see :class:`World`."""
        return GroupSpec(os.path.join(self._directory, f"store-{generation}"), generation, self._plan.world_size)

    def look(self) -> None:
        """Do nothing: the launcher reports the ends of processes by itself; see :class:`World`."""

    def close(self) -> None:
        """Close the wire and remove the directory."""
        self.wire.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if isinstance(self._launcher, ForkServer) and self._launcher.alive:
            self._launcher.forget_directory(self._directory)
