"""Ranks on the machines of an attached pool."""

from __future__ import annotations

from labkit.controller.launchers.launcher import OnExit
from labkit.controller.nodes import Nodes
from labkit.controller.plan import PoolPlan
from labkit.controller.world import ENVIRONMENT
from labkit.wire.messages import GroupSpec
from labkit.wire.node_messages import StartRank


class NodesWorld:
    """The ranks of one world; see :class:`labkit.controller.world.World`.

    Args:
        plan: What to start.
        nodes: The machines.
        name: No other world has it.
    """

    share_memory = False

    def __init__(self, plan: PoolPlan, nodes: Nodes, name: str) -> None:
        self._plan, self._nodes, self.name = plan, nodes, name
        self.wire = nodes

    def start(self, rank: int, group: GroupSpec, on_exit: OnExit, *, joining: bool) -> int:
        """Start the process of one rank; see :class:`labkit.controller.world.World`."""
        per_node = self._nodes.workers_per_node
        handle = self._nodes.next_handle()
        message = StartRank(handle, rank, rank % per_node, per_node, self._plan.device, group, joining, ENVIRONMENT)
        return self._nodes.start(message, on_exit)

    @property
    def places(self) -> dict[int, str]:
        """The machine of each rank, where there is more than one."""
        return self._nodes.places

    def adopt(self, node_rank: int, handle: int, on_exit: OnExit) -> None:
        """A process that was left running is one of this pool's ranks."""
        self._nodes.adopt(node_rank, handle, on_exit)

    def kill(self, handle: int) -> None:
        """Kill a process; see :class:`labkit.controller.world.World`."""
        self._nodes.kill(handle)

    def group(self, generation: int) -> GroupSpec:
        """Where the ranks meet: in torchrun's store, under names of this world's own."""
        return GroupSpec(f"{self._nodes.store}/{self.name}", generation, self._plan.world_size)

    def look(self) -> None:
        """See which machines have come and gone."""
        self._nodes.look()

    def close(self) -> None:
        """Nothing is left here; the machines clean up behind their ranks."""
