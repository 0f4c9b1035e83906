"""One machine of an attached pool, as the notebook sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labkit.controller.start.launchers.launcher import OnExit
from labkit.wire.node_messages import Arrived
from labkit.wire.versions import versions


@dataclass
class Node:
    """One machine.

    Attributes:
        node_rank: Its node rank.
        arrived: Its own report about itself; None before it has connected.
        reachable: Whether it answers.
        store: ``tcp://host:port`` of the store that it has opened for the ranks of all machines; empty if it has none.
        no_store: Why it has none.
        running: For each process started there, by its number, the function to call when it has ended.
    """

    node_rank: int
    arrived: Arrived | None = None
    reachable: bool = False
    store: str = ""
    no_store: str = ""
    running: dict[int, OnExit] = field(default_factory=dict)

    @property
    def peer(self) -> str:
        """The name under which the hub addresses its agent; empty before it has connected."""
        return self.arrived.life if self.arrived is not None else ""

    @property
    def name(self) -> str:
        """Its node rank and host name, for messages."""
        return f"node {self.node_rank}" + (f" ({self.arrived.hostname})" if self.arrived is not None else "")


@dataclass(frozen=True)
class NodeStatus:
    """The status of one machine of an attached pool.

    Attributes:
        node_rank: Its node rank.
        hostname: Its name.
        ranks: The ranks that run there.
        reachable: Whether it answers.
        agent_pid: The process that serves the ranks there.
    """

    node_rank: int
    hostname: str
    ranks: tuple[int, ...]
    reachable: bool
    agent_pid: int


def place_for(tag: Arrived, nodes: Sequence[Node]) -> Node | str:
    """Return the place of a machine that has connected, or the reason why it gets none.

    An agent that comes back gets the place it had. Any other agent gets the place that it claims, unless an agent that answers has
    that place. If it claims none, it gets the first place that no machine has had, else the first whose machine is out of reach.
    """
    for node in nodes:
        if node.peer == tag.life:
            return node
    if differ := _different_versions(tag.versions):
        return f"it has {', '.join(differ)}: install the same on every machine"
    if tag.node_rank is None:
        free = sorted((node for node in nodes if not node.reachable), key=lambda node: node.arrived is not None)
        return free[0] if free else f"the pool has its {len(nodes)} machine{'s' if len(nodes) != 1 else ''} already"
    claim = f"{tag.source} says that it is node {tag.node_rank}"
    if not 0 <= tag.node_rank < len(nodes):
        return f"{claim}, and the notebook attaches {len(nodes)}, counted from 0: make both equal"
    node = nodes[tag.node_rank]
    if not node.reachable:
        return node
    assert node.arrived is not None
    return (
        f"{claim}, which process {node.arrived.pid} on {node.arrived.hostname} is. Start one labkit process on each machine, and "
        "give every one its --node-rank or none"
    )


def _different_versions(theirs: Mapping[str, str]) -> list[str]:
    mine = versions()
    return [f"{name} {version} (here {mine[name]})" for name, version in theirs.items() if mine.get(name) != version]
