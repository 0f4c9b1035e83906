"""The agent of one machine of an attached pool: a process, started by a scheduler or by hand, that starts and serves the ranks.

For the ranks of its machine, the agent acts as the controller: it lets a fork server start them, and passes messages between them
and the notebook. So a rank's death is noticed on its own machine, and the other ranks keep their state. Unread output of a cell
fills a bounded backlog here, and no rank's memory.

The agent ends when the notebook tells it to, when the notebook has been silent for ``linger_s``, and on SIGTERM and SIGINT. The
ranks end with it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import zmq

from labkit.base import places
from labkit.base.machine import MemoryAtDeath
from labkit.errors import InvalidPoolError
from labkit.wire.hub import HubLink
from labkit.wire.messages import Execute, Failed, FromWorker, Output, Release, Result
from labkit.wire.node_messages import (
    AreYouThere,
    Arrived,
    Exited,
    ForRanks,
    FromNode,
    FromRank,
    KillRank,
    Leave,
    Left,
    NodeFailed,
    OpenStore,
    OpenWorld,
    StartRank,
    StoreOpened,
    ToNode,
    Welcome,
)
from labkit.wire.payload import Packed, to_frames, to_memory
from labkit.wire.transport import ControllerWire, Keys
from labkit.wire.versions import versions
from labkit.worker.groups.addresses import LOOPBACK, NodeClaim, address_towards, host_of, store_host
from labkit.worker.machine.backlog import Backlog
from labkit.worker.machine.rank_starter import RankStarter, make_spec
from labkit.worker.start import meeting_store

LOOK_MS = 250


class Agent:
    """The agent of one machine.

    Args:
        address: The hub's address.
        keys: The keys from the key file.
        claim: The node rank that it claims.
        linger_s: How long the ranks wait for a notebook that has fallen silent.
        wait_s: How long to wait for the notebook's first message.

    Raises:
        PlaceError: Others can change the temporary folder.
    """

    def __init__(self, address: str, keys: Keys, claim: NodeClaim, linger_s: float, wait_s: float) -> None:
        self._address, self._claim, self._linger_s, self._wait_s = address, claim, linger_s, wait_s
        self._life = uuid.uuid4().hex
        self._asked_to_end = ""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        os.rmdir(self._make_directory())  # a machine that cannot make one says so before the notebook counts on it
        self._starter = RankStarter()
        self._link = HubLink(address, keys, self._life)
        self._num_gpus: int | None = None
        self._silent_s, self._looked_at = 0.0, time.monotonic()
        self._met = self._told_of_refusal = False
        self._wire: ControllerWire | None = None
        self._directory = self._store = ""
        self._world = ""
        self._pids: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._doomed: set[int] = set()  # to be killed when their process ids are known
        self._generation = self._run_id = 0
        self._busy: set[int] = set()
        self._backlog = Backlog()
        self._held: Packed | None = None
        self._holders: set[int] = set()
        self._starter.send("count_gpus", -1, dict(os.environ))

    def run(self) -> str:
        """Serve until the end. Return the reason why it ended, empty if the notebook asked for it."""
        try:
            while True:
                self._poll()
                for reason in (self._hear_server(), self._hear_hub(), self._mind_silence()):
                    if reason is not None:
                        return reason
                self._hear_ranks()
                self._flush()
        finally:
            self._end()

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        poller = zmq.Poller()
        # A full backlog means that the notebook does not keep up. Then ranks are not read, and wait in print.
        poller.register(self._link.socket, zmq.POLLIN | (zmq.POLLOUT if self._backlog and self._link.connected else 0))
        poller.register(self._link.monitor, zmq.POLLIN)
        poller.register(self._starter.connection.fileno(), zmq.POLLIN)
        if self._wire is not None and self._hears_ranks:
            for source in self._wire.sources:
                poller.register(source, zmq.POLLIN)
        poller.poll(LOOK_MS)

    @property
    def _hears_ranks(self) -> bool:
        return not self._link.connected or not self._backlog.full

    def _hear_server(self) -> str | None:
        while self._starter.connection.poll(0):
            try:
                name, *args = self._starter.connection.recv()
            except (EOFError, OSError):
                return f"the fork server ended with exit code {self._starter.wait()}; its output stands above"
            if name == "broken":
                self._tell(NodeFailed(f"{socket.gethostname()} cannot import what ranks need: {args[0]}"))
                self._flush()
                return str(args[0])
            if name == "counted":
                self._num_gpus = args[1]
                self._introduce()
            elif name == "started":
                self._started(*args)
            elif name == "store_opened":
                self._store, reason = args
                self._tell(StoreOpened(self._store, reason))
            elif name == "exited":
                self._exited(*args)
        return None

    def _started(self, handle: int, pid: int) -> None:
        if handle in self._doomed or handle not in self._ranks:  # its world was closed in the meantime
            self._starter.send("kill", pid)
        if handle in self._ranks:
            self._pids[handle] = pid

    def _exited(self, pid: int, rank: int, code: int, rests: tuple[Any, Any], memory: MemoryAtDeath) -> None:
        if rank == meeting_store.RANK:
            self._store = ""
            self._tell(StoreOpened("", f"the store's process ended with exit code {code}"))
            return
        handle = next((handle for handle, other in self._pids.items() if other == pid), None)
        if handle is not None:
            del self._pids[handle], self._ranks[handle]
            self._doomed.discard(handle)
            self._busy.discard(rank)
            self._hear_ranks()  # first pass on what it sent before it died
            self._tell(Exited(handle, code, *rests, memory))

    def _hear_hub(self) -> str | None:
        if self._link.look():
            self._introduce()
        while (received := self._link.receive()) is not None:
            self._met = True
            tag, parts = received
            if isinstance(tag, Leave):
                return f"the notebook refuses this machine: {tag.refused}" if tag.refused else ""
            self._do(tag, parts)
        return None

    def _mind_silence(self) -> str | None:
        now = time.monotonic()
        if self._asked_to_end:
            return f"it was asked to end ({self._asked_to_end})"
        # Whoever holds the port can refuse, so ranks that wait for their notebook wait on.
        other_key = f"what answers at {self._address} knows another key: copy the notebook's present key file to this machine"
        if self._link.refused and not self._told_of_refusal:
            self._told_of_refusal = True
            sys.stderr.write(f"labkit: {other_key}. Until then this goes on trying.\n")
        # While this process is stopped or its machine sleeps, it cannot receive anything: that time does not count.
        passed, self._looked_at = min(now - self._looked_at, 4 * LOOK_MS / 1000), now
        self._silent_s = 0.0 if self._link.connected else self._silent_s + passed
        limit = self._linger_s if self._met else self._wait_s
        if self._silent_s <= limit:
            return None
        if self._link.refused:
            return other_key
        if self._met:
            return f"the notebook has been silent for {limit:g} s"
        return f"no notebook with this key answers at {self._address} after {limit:g} s: is the address right, and the port open?"

    def _on_signal(self, number: int, frame: object) -> None:
        self._asked_to_end = signal.Signals(number).name

    # ---- what the notebook wants ---------------------------------------------------------------------------------

    def _introduce(self) -> None:
        if self._num_gpus is not None and self._link.connected:
            claim, own = self._claim, address_towards(host_of(self._address))
            here = (socket.gethostname(), os.getpid(), own, self._num_gpus)
            tag = Arrived(claim.node_rank, claim.source, self._life, *here, versions(), self._left())
            self._link.send([pickle.dumps(tag, protocol=5)])

    def _left(self) -> Left | None:
        if not self._world:
            return None
        ranks = tuple((handle, self._ranks[handle], pid) for handle, pid in sorted(self._pids.items()))
        return Left(self._world, ranks, self._generation, self._run_id, tuple(sorted(self._busy)))

    def _do(self, tag: ToNode, parts: list[bytes]) -> None:
        if isinstance(tag, ForRanks):
            if self._wire is not None:
                message = pickle.loads(parts[0])
                if isinstance(message, Execute):
                    self._run_id, self._busy = message.run_id, set(tag.ranks)
                    self._generation = message.group.generation if message.group is not None else self._generation
                self._wire.send(tag.ranks, tag.channel, self._kept_here(message, tag.ranks, parts[1:]))
        elif isinstance(tag, StartRank):
            assert self._wire is not None
            self._ranks[tag.handle], self._generation = tag.rank, tag.group.generation
            self._starter.send("start", tag.handle, make_spec(tag, self._wire.endpoint, self._directory))
        elif isinstance(tag, KillRank):
            if tag.handle in self._pids:
                self._starter.send("kill", self._pids[tag.handle])
            elif tag.handle in self._ranks:
                self._doomed.add(tag.handle)
        elif isinstance(tag, Welcome):
            self._claim = NodeClaim(tag.node_rank, "the notebook")  # it keeps this rank when it reconnects
        elif isinstance(tag, OpenStore):
            self._open_store(tag)
        elif isinstance(tag, OpenWorld):
            self._close_world()
            self._world = tag.name
            self._directory = self._make_directory()
            self._starter.send("directory", self._directory)
            self._wire = ControllerWire(self._directory, Keys.generate())
        else:
            assert isinstance(tag, AreYouThere)

    def _make_directory(self) -> str:
        """Make a private directory for a world's sockets."""
        return places.new_temporary("labkit-", longest=places.FOR_SOCKETS)

    def _open_store(self, tag: OpenStore) -> None:
        if self._store:
            self._tell(StoreOpened(self._store))
            return
        try:
            host = LOOPBACK if tag.on_one_machine else store_host(tag.others, self._address, os.environ)
        except InvalidPoolError as error:
            self._tell(StoreOpened("", str(error)))
            return
        self._starter.send("open_store", host)

    def _kept_here(self, message: Any, ranks: Sequence[int], frames: list[bytes]) -> Any:
        """Return the message with its large buffers in memory that all ranks of this machine share."""
        if not frames:
            return message
        assert isinstance(message, Execute)
        assert message.payload is not None
        self._let_go()
        self._held, self._holders = to_memory(message.payload, frames), set(ranks)
        return replace(message, payload=self._held.payload)

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _close_world(self) -> None:
        self._let_go()
        for pid in self._pids.values():
            self._starter.send("kill", pid)
        self._pids.clear()
        self._ranks.clear()
        self._doomed.clear()
        self._busy.clear()
        self._world, self._generation, self._run_id = "", 0, 0
        self._backlog.clear()
        if self._wire is not None:
            self._wire.close()
            self._wire = None
            shutil.rmtree(self._directory, ignore_errors=True)
            self._starter.send("forget", self._directory)

    # ---- what the ranks say --------------------------------------------------------------------------------------

    def _hear_ranks(self) -> None:
        while self._wire is not None and self._hears_ranks and (received := self._wire.receive(0.0)):
            for message, _ in received:
                self._pass_on(message)

    def _pass_on(self, message: FromWorker) -> None:
        frames: list[Any] = []
        if isinstance(message, Result | Failed):
            self._holders.discard(message.rank)
            self._busy.discard(message.rank)
            if not self._holders:
                self._let_go()
        if isinstance(message, Result) and message.payload is not None:
            payload, frames = to_frames(message.payload)
            if frames:
                # The agent has mapped them, so the rank need not keep them.
                assert self._wire is not None
                self._wire.send((message.rank,), "control", Release(message.run_id))
                message = replace(message, payload=payload)
        self._tell(FromRank(), pickle.dumps(message, protocol=5), *frames, output=message if isinstance(message, Output) else None)

    def _tell(self, tag: FromNode, *parts: Any, output: Output | None = None) -> None:
        self._backlog.add(tag, *parts, output=output)
        if not self._link.connected:
            self._backlog.forget_oldest_output()

    def _flush(self) -> None:
        while self._link.connected and (parts := self._backlog.first()) is not None and self._link.send(parts):
            self._backlog.taken()

    # ---- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._close_world()
        self._starter.end()
        self._link.close()
