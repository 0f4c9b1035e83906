"""The process groups of this rank: forming them, aborting them from outside, renewing them."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Set
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from labkit.base.limits import LIMITS
from labkit.wire.messages import GroupSpec
from labkit.wire.spec import WorkerSpec
from labkit.worker.groups import backends, loopback_peers, new_groups, through_host
from labkit.worker.groups.addresses import INTERFACE, addresses_of
from labkit.worker.groups.conditions import Condition, GroupCondition
from labkit.worker.groups.judgement import judge
from labkit.worker.steps import cut
from labkit.worker.steps.step_gate import StepGate

# torch's name for the default group if it is the first one.
DEFAULT_GROUP = "0"

# labkit explains a hang within seconds and ends it on request, so torch's own limit is only a last resort. With NCCL that limit
# also ends the process, which would lose the rank's state while the reader is still thinking.
TIMEOUT = timedelta(hours=24)

# After a run, a GPU has at most a few steps of work queued, unless it waits for a rank that will not come.
SETTLE_S = 1.0


class ProcessGroups:
    """The default group of a rank and all groups made from it.

    Args:
        spec: The worker's place in the pool.

    Attributes:
        gate: The gate before the optimizer steps that are queued on the device; it is shut before anything is aborted.
        lost: Whether the groups were aborted and wait for new backends.
        formed_ns: When the groups got their present backends, in nanoseconds since the epoch as in torch's flight recorder.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self.device = torch.device("cuda", spec.gpu) if spec.device == "cuda" else torch.device("cpu")
        self.gate = StepGate(self.device)
        self._lock = threading.Lock()
        self._renewed_by = 0
        self._stores = [spec.group.store]  # the groups' store, then the store of a meeting under way
        self._store_ports = {cut.store_port(spec.group.store)}
        self._on_one_machine = spec.local_world_size == spec.world_size
        self._gloo_sockets: set[tuple[int, int]] = set()
        self._hosts: set[str] = set()
        self._cut_sockets: list[socket.socket] = []
        self._store: Any = None
        self._default: Any = None
        self.formed_ns = 0
        self.lost = False

    def form(self) -> None:
        """Form the default group and complete one collective on it. Collective. Blocks until every rank has joined."""
        self._store = _store(self._spec.group)
        self._form()

    def join(self) -> None:
        """Join a running pool: meet the other ranks, and form the default group while they renew theirs.

        Collective over all ranks of the pool. Blocks until they have joined.

        Raises:
            RuntimeError: The rank cannot join. All ranks raise the same error.
        """
        world = tuple(range(self._spec.world_size))
        default = {DEFAULT_GROUP: GroupCondition(world, ())}
        condition = Condition(self._spec.rank, run_id=0, lost=True, new=True, groups=default)
        conditions = self.meet(self._spec.group, 0, condition.to_json)
        try:
            verdict = judge([Condition.from_json(text) for text in conditions])
        except RuntimeError:
            # This rank ends now and interrupts whatever the others do: first wait until they have read the same conditions.
            self._store.wait([f"met/{rank}" for rank in range(self._spec.world_size)])
            raise
        self._form()
        backends.set_group_count(verdict.group_count)

    def _form(self) -> None:
        if self._on_one_machine:
            # Otherwise gloo binds to the address that the host name resolves to, and there may be none.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        new_groups.install()
        loopback_peers.install()
        bound: dict[str, Any] = {}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._spec.shares_gpu:
            through_host.install()
        elif self.device.type == "cuda":
            # With gloo torch would then split groups for meshes, which gloo cannot do.
            bound["device_id"] = self.device
        dist.init_process_group(
            backend_of(self._spec),
            store=self._store,
            rank=self._spec.rank,
            world_size=self._spec.world_size,
            timeout=TIMEOUT,
            **bound,
        )
        self._default = dist.group.WORLD
        self._first_collective()
        if self._on_one_machine:
            self._gloo_sockets = self._peer_sockets()
        else:
            # No user code has run here yet, and gloo has connected each rank with every other.
            self._gloo_sockets = cut.connected_sockets(except_ports=self._store_ports)
            self._hosts = cut.peer_hosts(self._gloo_sockets)

    def _peer_sockets(self) -> set[tuple[int, int]]:
        return cut.peer_sockets(self._hosts, except_ports=self._store_ports)

    def _cut_gloo(self) -> list[socket.socket]:
        return cut.cut_gloo(self._gloo_sockets, self._hosts, except_ports=self._store_ports)

    @property
    def own_collectives(self) -> int:
        """The number of collectives that labkit itself begins on the default group each time it is formed."""
        return 0 if self.foreign else 1

    @property
    def foreign(self) -> bool:
        """True if a cell has replaced labkit's default group by its own."""
        return dist.is_initialized() and dist.group.WORLD is not self._default

    @property
    def obstacle(self) -> str:
        """The reason why a new rank cannot join labkit's default group; empty if it can."""
        if not dist.is_initialized():
            return "destroyed"
        return "made anew" if self.foreign else ""

    def finish_device_work(self) -> None:
        """Wait for the accelerator, so that hangs and errors of a cell appear in that cell and not in the next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def abort(self, run_id: int) -> str:
        """Free the main thread from any collective. The control thread calls this at any time, also repeatedly.

        Args:
            run_id: The run to free it from. An abort that arrives after the groups were renewed does nothing.

        Returns:
            A description of what was done, for the log.
        """
        with self._lock:
            if run_id < self._renewed_by:
                return "too late: the groups have been renewed"
            communicators = self._abort_nccl()
            cut_now = self._cut_gloo()
            self._cut_sockets += cut_now
            for store in self._stores:
                cut.cut_store(store)
        return f"{communicators} NCCL communicators aborted, {len(cut_now)} gloo sockets shut down"

    def settle(self) -> None:
        """Wait until the device has reached the last queued optimizer step. If it waits for a rank that has left, abort.

        Call this only after a run, when every rank has left it. Blocks for at most SETTLE_S, plus the time of an abort.
        """
        if not self.gate.settled(SETTLE_S):
            with self._lock:
                self._abort_nccl()
            self.gate.settled(backends.ABORT_S)

    def _abort_nccl(self) -> int:
        self.lost = True
        self.gate.shut()
        return backends.abort_nccl() if self.device.type == "cuda" else 0

    def meet(self, group: GroupSpec, run_id: int, condition: Callable[[], str]) -> list[str]:
        """Exchange the ranks' conditions before anything is repaired. Collective over all ranks of the pool.

        Args:
            group: The place where the ranks meet; a new one each time.
            run_id: The run that repairs; from now on aborts of earlier runs come too late.
            condition: Describes this rank. It is called when no abort can come any more that it would not mention.

        Returns:
            The condition of each rank as text, in rank order.
        """
        with self._lock:
            self._renewed_by = run_id
            self._stores = [self._stores[0], group.store]
            self._store_ports.add(cut.store_port(group.store))  # another port if node 0 was replaced
            self._store = _store(group)
        if not self._on_one_machine:
            # A rank that joins may be on a machine that was not there when the groups were formed.
            self._store.set(f"hosts/{self._spec.rank}", ",".join(addresses_of(os.environ.get(INTERFACE, "").partition(",")[0])))
        self._store.set(f"condition/{self._spec.rank}", condition())
        conditions = [self._store.get(f"condition/{rank}").decode() for rank in range(group.world_size)]
        if not self._on_one_machine:
            said = [self._store.get(f"hosts/{rank}").decode().split(",") for rank in range(group.world_size)]
            self._hosts |= {host for hosts in said for host in hosts if host}
        self._store.set(f"met/{self._spec.rank}", "")
        return conditions

    def renew(self, broken: Set[str]) -> None:
        """Give every working group new backends. Collective over all ranks of the pool, after :meth:`meet`.

        Args:
            broken: Names of groups to leave out, equal on all ranks.
        """
        if not self.lost:
            self._abort_nccl()
            self._cut_sockets += self._cut_gloo()
        others = self._peer_sockets()
        for group in sorted(backends.groups(), key=_order):
            if backends.group_name(group) not in broken:
                backends.replace_backends(group, self._store, TIMEOUT)
        self._first_collective()
        self.gate.reopen()
        while self._cut_sockets:  # every rank has been here, so the old connections are unused
            self._cut_sockets.pop().close()
        self.lost = False
        self._stores = self._stores[-1:]
        self._gloo_sockets = self._peer_sockets() - others

    def _first_collective(self) -> None:
        """Connect everything now: otherwise the first use would make gloo's pairs and NCCL's communicator.

        The device's collective comes first: a rank that joins makes its communicator while it forms its group, and waits there.
        """
        ones = torch.ones(1)
        if self.device.type == "cuda":
            on_device = ones.to(self.device)
            if not self._spec.shares_gpu:  # else both go through the same gloo backend, and the next one connects it
                dist.all_reduce(on_device)
            torch.cuda.synchronize()
        dist.all_reduce(ones)
        self.formed_ns = time.time_ns()

    def present_since(self) -> dict[str, int]:
        """Return, by name, when each present group got its present backends, in nanoseconds as in torch's flight recorder."""
        names = map(backends.group_name, backends.groups())
        return {name: max(self.formed_ns, new_groups.born_ns(name)) for name in names}


def backend_of(spec: WorkerSpec) -> str:
    """Return what torch calls the backends of a pool's groups."""
    if spec.device == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:gloo" if spec.shares_gpu else "cpu:gloo,cuda:nccl"


def _order(group: Any) -> tuple[bool, str]:
    """Return a sort key that puts the default group first and is equal on all ranks: forming a group waits for its other ranks."""
    return group is not dist.group.WORLD, backends.group_name(group)


def _store(group: GroupSpec) -> Any:
    if group.store.startswith("tcp://"):
        address, _, name = group.store.removeprefix("tcp://").partition("/")
        host, _, port = address.rpartition(":")
        # torch keeps trying to connect to a store that has just ended, and nothing can interrupt it.
        patience = timedelta(seconds=LIMITS.connect_s)
        store = _c10d.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=patience)
        store.set_timeout(TIMEOUT)
        return _c10d.PrefixStore(f"labkit/{name}/{group.generation}", store)
    return _c10d.FileStore(group.store, group.world_size)
