"""The messages between the controller and the agents on the machines of an attached pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from labkit.machine import MemoryAtDeath
from labkit.wire.messages import GroupSpec
from labkit.wire.pipes import Rest
from labkit.wire.record import Record
from labkit.wire.transport import Channel


@dataclass(frozen=True, slots=True)
class Left(Record):
    """The ranks that run on a machine.

    Attributes:
        world: The name of their world, from `OpenWorld`.
        ranks: Number, rank and process id of each.
        generation: Of the process groups that were asked for last.
        run_id: The run that was asked for last.
        busy: The ranks that have not ended it.
    """

    world: str
    ranks: tuple[tuple[int, int, int], ...]
    generation: int
    run_id: int
    busy: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrived(Record):
    """An agent is there. It says so again each time its connection is made anew.

    Attributes:
        node_rank: The place among the machines that it claims; None takes the first free one.
        source: What gave it that place: an option, a variable, or the notebook; empty where it claims none.
        life: A random name of this agent process: another one means that it was started anew.
        hostname: The machine's name.
        pid: The agent's process id there.
        address: Its own address on the way to the notebook; empty where it knows none.
        num_gpus: GPUs that ranks started there would see.
        versions: Of what must be equal everywhere, by name.
        left: What an earlier notebook has left running there; None where nothing was started.
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
class Welcome(Record):
    """The machine is part of the pool, in that place."""

    node_rank: int


@dataclass(frozen=True, slots=True)
class OpenStore(Record):
    """Open the store in which the ranks of all machines meet, or name the one that is open.

    Attributes:
        on_one_machine: All ranks run on this machine, so it listens on the loopback device.
        others: The addresses of the other machines on their way to the notebook.
    """

    on_one_machine: bool
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreOpened(Record):
    """The store's address, or the reason why there is none.

    Attributes:
        address: ``tcp://host:port``; empty where none is open.
        reason: Why none is open.
    """

    address: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StartRank(Record):
    """Start the process of one rank.

    Attributes:
        handle: The controller's number for that process.
        local_world_size: Ranks on that machine.
        defaults: Environment variables, where the machine does not set them.
    """

    handle: int
    rank: int
    local_rank: int
    local_world_size: int
    device: Literal["cpu", "cuda"]
    group: GroupSpec
    joining: bool
    defaults: dict[str, str]


@dataclass(frozen=True, slots=True)
class KillRank(Record):
    """Kill the process with that number and all that it has started."""

    handle: int


@dataclass(frozen=True, slots=True)
class OpenWorld(Record):
    """Ranks of a new world of that name are about to be started; what is left of an earlier one is killed."""

    name: str


@dataclass(frozen=True, slots=True)
class Leave(Record):
    """End: the pool is closed, or this machine cannot be part of it.

    Attributes:
        refused: Why; empty when the pool is closed.
    """

    refused: str = ""


@dataclass(frozen=True, slots=True)
class AreYouThere(Record):
    """Needs no answer: what counts is whether it could be sent."""


@dataclass(frozen=True, slots=True)
class Exited(Record):
    """A process that was started has ended; fields as in :class:`labkit.controller.launchers.launcher.WorkerExit`."""

    handle: int
    exitcode: int
    stdout: Rest
    stderr: Rest
    memory: MemoryAtDeath | None


@dataclass(frozen=True, slots=True)
class NodeFailed(Record):
    """The machine can start no ranks."""

    reason: str


@dataclass(frozen=True, slots=True)
class ForRanks(Record):
    """The next part is a message to these ranks of the machine."""

    ranks: tuple[int, ...]
    channel: Channel


@dataclass(frozen=True, slots=True)
class FromRank(Record):
    """The next part is a message from a rank of the machine."""


ToNode = Welcome | OpenStore | StartRank | KillRank | OpenWorld | Leave | AreYouThere | ForRanks
FromNode = Arrived | StoreOpened | Exited | NodeFailed | FromRank
