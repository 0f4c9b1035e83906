"""The messages between the controller and the agents on the machines of an attached pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from labkit.base.machine import MemoryAtDeath
from labkit.wire.messages import GroupSpec
from labkit.wire.pipes import Rest
from labkit.wire.record import WireRecord
from labkit.wire.transport import Channel


@dataclass(frozen=True, slots=True)
class Left(WireRecord):
    """The ranks that are running on a machine.

    Attributes:
        world: The name of their world, from `OpenWorld`.
        ranks: Number, rank and process id of each.
        generation: The generation of the process groups requested last.
        run_id: The run requested last.
        busy: The ranks that have not ended that run.
    """

    world: str
    ranks: tuple[tuple[int, int, int], ...]
    generation: int
    run_id: int
    busy: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrived(WireRecord):
    """An agent has connected. It sends this again each time its connection is made anew.

    Attributes:
        node_rank: The node rank that it claims; None takes the first free one.
        source: Where it got that node rank from: an option, a variable, or the notebook; empty if it claims none.
        life: A random name of this agent process; a different one means that the agent was restarted.
        hostname: The machine's name.
        pid: The agent's process id there.
        address: Its own address on the way to the notebook; empty if it knows none.
        num_gpus: GPUs that ranks started there would see.
        versions: The versions that must be equal everywhere, by name.
        left: The ranks that an earlier notebook left running there; None if none were started.
    """

    node_rank: int | None
    source: str
    life: str
    hostname: str
    pid: int
    address: str
    num_gpus: int
    versions: dict[str, str]
    left: Left | None = None


@dataclass(frozen=True, slots=True)
class Welcome(WireRecord):
    """The machine is part of the pool, with this node rank."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class OpenStore(WireRecord):
    """Open the store in which the ranks of all machines meet, or name the store that is already open.

    Attributes:
        on_one_machine: Whether all ranks run on this machine, so that the store listens on the loopback device.
        others: The addresses of the other machines on their way to the notebook.
    """

    on_one_machine: bool
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreOpened(WireRecord):
    """The store's address, or the reason why no store is open.

    Attributes:
        address: ``tcp://host:port``; empty if none is open.
        reason: Why no store is open.
    """

    address: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StartRank(WireRecord):
    """Start the process of one rank.

    Attributes:
        handle: The controller's number for that process.
        local_world_size: Ranks on that machine.
        defaults: Environment variables to set if the machine does not set them.
        num_gpus: GPUs for these ranks; if they are fewer, the ranks share them.
    """

    handle: int
    rank: int
    local_rank: int
    local_world_size: int
    device: Literal["cpu", "cuda"]
    group: GroupSpec
    joining: bool
    defaults: dict[str, str]
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class KillRank(WireRecord):
    """Kill the process with that number and all processes it has started."""

    handle: int


@dataclass(frozen=True, slots=True)
class OpenWorld(WireRecord):
    """Prepare to start the ranks of a new world of that name, and kill the remains of an earlier one."""

    name: str


@dataclass(frozen=True, slots=True)
class Leave(WireRecord):
    """End the agent: the pool is closed, or this machine cannot be part of it.

    Attributes:
        refused: Why the machine was refused; empty if the pool is closed.
    """

    refused: str = ""


@dataclass(frozen=True, slots=True)
class AreYouThere(WireRecord):
    """A probe that needs no answer: that it can be sent is enough."""


@dataclass(frozen=True, slots=True)
class Exited(WireRecord):
    """A rank's process has ended. Fields as in :class:`labkit.controller.start.launchers.launcher.WorkerExit`."""

    handle: int
    exitcode: int
    stdout: Rest
    stderr: Rest
    memory: MemoryAtDeath | None


@dataclass(frozen=True, slots=True)
class NodeFailed(WireRecord):
    """The machine cannot start ranks."""

    reason: str


@dataclass(frozen=True, slots=True)
class ForRanks(WireRecord):
    """The next part is a message to these ranks of the machine."""

    ranks: tuple[int, ...]
    channel: Channel


@dataclass(frozen=True, slots=True)
class FromRank(WireRecord):
    """The next part is a message from a rank of the machine."""


ToNode = Welcome | OpenStore | StartRank | KillRank | OpenWorld | Leave | AreYouThere | ForRanks
FromNode = Arrived | StoreOpened | Exited | NodeFailed | FromRank
