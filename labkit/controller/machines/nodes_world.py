"""Ranks on the machines of an attached pool."""

from __future__ import annotations

import time

from labkit.controller.machines.nodes import Nodes
from labkit.controller.start.launchers.launcher import OnExit
from labkit.controller.start.pool_plan import PoolPlan
from labkit.controller.start.world import ENVIRONMENT
from labkit.errors import PoolStateError
from labkit.wire.messages import GroupSpec
from labkit.wire.node_messages import OpenStore, StartRank

STORE_WITHIN_S = 30.0


class NodesWorld:
    """The ranks of one world; see :class:`labkit.controller.start.world.World`.

    Args:
        plan: The pool to start.
        nodes: The machines.
        name: The world's unique name.
        on_one_machine: Whether all ranks run on this machine or there is only one machine, so that they meet on its loopback
            device.
    """

    share_memory = False

    def __init__(self, plan: PoolPlan, nodes: Nodes, name: str, *, on_one_machine: bool) -> None:
        self._plan, self._nodes, self.name, self._on_one_machine = plan, nodes, name, on_one_machine
        self.wire = nodes

    def start(self, rank: int, group: GroupSpec, on_exit: OnExit, *, joining: bool) -> int:
        """Start the process of one rank; see :class:`labkit.controller.start.world.World`."""
        per_node = self._nodes.workers_per_node
        handle = self._nodes.next_handle()
        plan = self._plan
        message = StartRank(handle, rank, rank % per_node, per_node, plan.device, group, joining, ENVIRONMENT, plan.num_gpus)
        return self._nodes.start(message, on_exit)

    @property
    def places(self) -> dict[int, str]:
        """The machine of each rank, if there is more than one machine."""
        return self._nodes.places

    def adopt(self, node_rank: int, handle: int, on_exit: OnExit) -> None:
        """Adopt a process that was left running as one of this pool's ranks."""
        self._nodes.adopt(node_rank, handle, on_exit)

    def kill(self, handle: int) -> None:
        """Kill a process; see :class:`labkit.controller.start.world.World`."""
        self._nodes.kill(handle)

    def group(self, generation: int) -> GroupSpec:
        """Return the place where the ranks meet: the store of node 0, with this world's name as prefix.

        Raises:
            PoolStateError: Node 0 has not opened a store yet, and cannot open one or is out of reach.
        """
        first, *others = self._nodes.nodes
        if not first.store:
            first.no_store, deadline = "", time.monotonic() + STORE_WITHIN_S
            addresses = tuple(node.arrived.address for node in others if node.arrived is not None)
            self._nodes.ask_for_store(OpenStore(self._on_one_machine, addresses))
            while not first.store:
                self._nodes.look(0.2)
                if first.no_store or not first.reachable or time.monotonic() > deadline:
                    reason = first.no_store or "it does not answer"
                    raise PoolStateError(f"{first.name} opens no store in which the ranks can meet: {reason}")
        return GroupSpec(f"{first.store}/{self.name}", generation, self._plan.world_size)

    def look(self) -> None:
        """Check which machines have come and gone."""
        self._nodes.look()

    def close(self) -> None:
        """Do nothing: the machines clean up after their ranks."""
