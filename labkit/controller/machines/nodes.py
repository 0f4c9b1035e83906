"""The machines of an attached pool: which have connected, which are out of reach, and what runs on them."""

from __future__ import annotations

import itertools
import pickle
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from labkit.base.plain_text import name_ranks, printable
from labkit.controller.machines.node import Node, NodeStatus, place_for
from labkit.controller.start.launchers.launcher import OnExit, WorkerExit
from labkit.errors import InvalidPoolError, PoolStateError, WorkerStartError
from labkit.wire.hub import Hub
from labkit.wire.messages import FromWorker, ToControl, ToMain
from labkit.wire.node_messages import (
    AreYouThere,
    Arrived,
    Exited,
    ForRanks,
    FromRank,
    KillRank,
    Leave,
    Left,
    NodeFailed,
    OpenStore,
    OpenWorld,
    StartRank,
    Welcome,
)
from labkit.wire.transport import Channel, Keys

PROBE_EVERY_S = 0.5
_NO_EXIT_CODE = 0


class Nodes:
    """The machines of an attached pool. The object lives as long as the pool, across all its restarts.

    Args:
        num_nodes: The number of machines.
        workers_per_node: Ranks on each.
        address: The address to listen on, ``tcp://INTERFACE:PORT``.
        keys: The pool's keys.
        way_back: Returns advice about a machine that is out of reach, in a sentence.

    Raises:
        InvalidPoolError: The address cannot be bound.
    """

    def __init__(self, num_nodes: int, workers_per_node: int, address: str, keys: Keys, way_back: Callable[[], str]) -> None:
        self.workers_per_node, self._way_back = workers_per_node, way_back
        try:
            self._hub = Hub(address, keys, num_nodes)
        except OSError as error:
            raise InvalidPoolError(
                f"this machine cannot listen on {address}: {error.strerror}. Another notebook may hold that port, or the interface "
                "is not this machine's; name others: listen='tcp://0.0.0.0:29600' (port * takes a free one)."
            ) from None
        self.port, self._interface = self._hub.port, address.removeprefix("tcp://").rpartition(":")[0]
        self.nodes = [Node(place) for place in range(num_nodes)]
        self._handles = itertools.count(1)
        self._next_probe = 0.0
        self._stash: list[tuple[FromWorker, list[bytes]]] = []
        self._world_name = self._refused = ""

    def statuses(self) -> tuple[NodeStatus, ...]:
        """Return the status of each machine that has connected."""
        return tuple(
            NodeStatus(node.node_rank, node.arrived.hostname, self._ranks_of(node), node.reachable, node.arrived.pid)
            for node in self.nodes
            if node.arrived is not None
        )

    def _ranks_of(self, node: Node) -> tuple[int, ...]:
        first = node.node_rank * self.workers_per_node
        return tuple(range(first, first + self.workers_per_node))

    # ---- arrival -------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> list[Node]:
        """The machines that have not connected or are out of reach."""
        return [node for node in self.nodes if not node.reachable]

    def await_arrival(self, timeout_s: float, stop_if_asked: Callable[[], None], on_change: Callable[[], None]) -> None:
        """Wait until every machine has connected.

        Args:
            timeout_s: The longest time to wait.
            stop_if_asked: Called at points where the wait can be interrupted; it may raise.
            on_change: Called when a machine has come or gone.

        Raises:
            WorkerStartError: A machine cannot start ranks, was refused, or has not connected in time; the message names it.
        """
        deadline = time.monotonic() + timeout_s
        seen: list[tuple[str, bool]] = []
        self._refused = ""
        while True:
            self.receive(0.2)
            now = [(node.name, node.reachable) for node in self.nodes]
            if now != seen:
                seen = now
                on_change()
            if not self.missing:
                return
            if self._refused:
                raise WorkerStartError(self._refused)
            if time.monotonic() > deadline:
                raise WorkerStartError(self._not_there(timeout_s))
            stop_if_asked()

    def _not_there(self, waited_s: float) -> str:
        there = len(self.nodes) - len(self.missing)
        names = ", ".join(node.name for node in self.missing)
        text = f"{there} of {len(self.nodes)} machines arrived in {waited_s:g} s; missing: {names}. "
        if self._interface in ("127.0.0.1", "localhost") and len(self.nodes) > 1:
            return f"{text}This notebook listens where only programs on this machine reach it: listen='tcp://0.0.0.0:*'"
        return (
            f"{text}Does the command run there, does it reach this machine's port {self.port}, and has it the present key file? "
            "It says so itself"
        )

    @property
    def places(self) -> dict[int, str]:
        """The machine of each rank, by a name that is unique among the machines; empty if there is only one machine."""
        names = [node.arrived.hostname if node.arrived is not None else "" for node in self.nodes]
        if len(set(names)) < len(names):
            names = [f"node {node.node_rank}" for node in self.nodes]
        if len(names) == 1:
            return {}
        return {rank: names[rank // self.workers_per_node] for rank in range(len(names) * self.workers_per_node)}

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of the machine that has the fewest."""
        return min((node.arrived.num_gpus if node.arrived is not None else 0) for node in self.nodes)

    def open_world(self) -> str:
        """Prepare the machines for the ranks of a new world. Return its unique name."""
        self._world_name = uuid.uuid4().hex[:12]
        for node in self.nodes:
            node.running.clear()
            self._hub.send(node.peer, OpenWorld(self._world_name))
        return self._world_name

    def left(self) -> dict[int, Left]:
        """Return the ranks that an earlier notebook left running, by node rank; empty unless all machines have the same world."""
        found = {
            node.node_rank: node.arrived.left for node in self.nodes if node.arrived is not None and node.arrived.left is not None
        }
        names = {left.world for left in found.values()}
        return found if len(found) == len(self.nodes) and len(names) == 1 else {}

    def adopt(self, node_rank: int, handle: int, on_exit: OnExit) -> None:
        """Adopt a process that an earlier notebook left running."""
        self.nodes[node_rank].running[handle] = on_exit
        self._handles = itertools.count(max(handle, next(self._handles)) + 1)

    def adopt_world(self, name: str) -> None:
        """Continue the world that an earlier notebook left."""
        self._world_name = name

    def close(self) -> None:
        """Close the port without telling the machines: their ranks wait for a notebook that comes back."""
        self._hub.close()

    def leave(self) -> None:
        """Tell every machine to end, and close the port. Blocks for at most about 1 s."""
        for node in self.nodes:
            self._hub.send(node.peer, Leave())
        self._hub.close()

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, ranks: Sequence[int], channel: Channel, message: ToMain | ToControl, frames: Sequence[Any] = ()) -> None:
        """Send one message to several ranks; it crosses the network once for each machine. See :class:`Wire`."""
        pickled = pickle.dumps(message, protocol=5)
        for node in self.nodes:
            here = tuple(rank for rank in ranks if rank // self.workers_per_node == node.node_rank)
            if here and node.reachable and not self._hub.send(node.peer, ForRanks(here, channel), pickled, *frames):
                self._lose(node, "it does not answer")

    def receive(self, timeout_s: float) -> list[tuple[FromWorker, list[bytes]]]:
        """Wait for messages of the ranks. Messages of the machines themselves are handled here. See :class:`Wire`."""
        received: list[tuple[FromWorker, list[bytes]]] = []
        for peer, tag, parts in self._hub.receive(min(timeout_s, PROBE_EVERY_S)):
            node = next((node for node in self.nodes if node.peer == peer), None)
            if isinstance(tag, Arrived):
                self._arrive(tag)
            elif isinstance(tag, NodeFailed):
                self._refused = tag.reason
            elif node is None:
                continue  # it was refused, or another machine has its place
            elif isinstance(tag, FromRank):
                received.append((pickle.loads(parts[0]), parts[1:]))
            elif isinstance(tag, Exited):
                on_exit = node.running.pop(tag.handle, None)
                if on_exit is not None:
                    on_exit(WorkerExit(tag.handle, tag.exitcode, tag.stdout, tag.stderr, tag.memory))
            else:
                node.store, node.no_store = tag.address, tag.reason
        self._probe()
        stashed, self._stash = self._stash, []
        return stashed + received

    def look(self, timeout_s: float = 0.0) -> None:
        """Process events since the last call. Messages of the ranks are kept for the next :meth:`receive`."""
        self._next_probe = 0.0
        self._stash = self.receive(timeout_s)

    def wake(self) -> None:
        """Make :meth:`receive` return; see :class:`Wire`."""
        self._hub.wake()

    def _probe(self) -> None:
        """Find out which machines are out of reach, by whether a message to them can be sent."""
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + PROBE_EVERY_S
        for node in self.nodes:
            if node.reachable and not self._hub.send(node.peer, AreYouThere()):
                self._lose(node, "its connection is lost: the machine is down, cut off, or its labkit process has ended")

    def _lose(self, node: Node, why: str) -> None:
        node.reachable = False
        self._end_running(node, f"{node.name} is out of reach ({why})")

    def _end_running(self, node: Node, cause: str) -> None:
        running, node.running = node.running, {}
        for handle, on_exit in running.items():
            on_exit(WorkerExit(handle, _NO_EXIT_CODE, cause=cause))

    def _arrive(self, tag: Arrived) -> None:
        # Shown in tables and errors; a machine's name comes from the machine.
        tag = replace(tag, hostname=printable(tag.hostname), source=printable(tag.source))
        self._next_probe = 0.0
        self._probe()  # so that a machine that has just gone frees its place for its replacement
        node = place_for(tag, self.nodes)
        if isinstance(node, str):
            self._refused = f"{tag.hostname} (process {tag.pid}) cannot take part: {node}"
            self._hub.send(tag.life, Leave(node))
            return
        before, node.arrived = node.arrived, tag
        anew = before is not None and before.life != tag.life
        self._hub.send(node.peer, Welcome(node.node_rank))
        if anew:
            self._end_running(node, f"the labkit process of {node.name} was started anew")
            node.store = ""  # it ended with the agent
        if self._world_name and (anew or (before is not None and not node.reachable)):
            # The pool counts its ranks as dead, and the others have gone on without them.
            self._hub.send(node.peer, OpenWorld(self._world_name))
        node.reachable = True

    # ---- processes -----------------------------------------------------------------------------------------------

    def start(self, message: StartRank, on_exit: OnExit) -> int:
        """Start a rank and return the number of its process.

        Raises:
            PoolStateError: Its machine is out of reach.
        """
        node = self.nodes[message.rank // self.workers_per_node]
        if not node.reachable or not self._hub.send(node.peer, message):
            raise self._out_of_reach(node)
        node.running[message.handle] = on_exit
        return message.handle

    def refuse_missing(self) -> None:
        """Raise an error if a machine is missing.

        Raises:
            PoolStateError: A machine is out of reach.
        """
        for node in self.missing:
            raise self._out_of_reach(node)

    def _out_of_reach(self, node: Node) -> PoolStateError:
        return PoolStateError(f"{node.name} ({name_ranks(self._ranks_of(node))}) is out of reach. {self._way_back()}")

    def next_handle(self) -> int:
        """Return a number that no other process of the pool has."""
        return next(self._handles)

    def kill(self, handle: int) -> None:
        """Kill a process by its number."""
        for node in self.nodes:
            if handle in node.running:
                self._hub.send(node.peer, KillRank(handle))

    def ask_for_store(self, message: OpenStore) -> None:
        """Ask node 0 for the store, which a later :meth:`look` learns. Raise PoolStateError if node 0 is out of reach."""
        first = self.nodes[0]
        if not first.reachable or not self._hub.send(first.peer, message):
            raise self._out_of_reach(first)
