"""One machine of an attached pool, as the notebook knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labkit.controller.launchers.launcher import OnExit
from labkit.wire.node_messages import Arrived
from labkit.wire.versions import versions


@dataclass
class Node:
    """One machine.

    Attributes:
        node_rank: Its place.
        arrived: What it said of itself; None before it has come.
        reachable: It answers.
        store: ``tcp://host:port`` of the store that it has opened for the ranks of all machines; empty where it has none.
        no_store: Why it has none.
        running: By number, what to call when a process that was started there has ended.
    """

    node_rank: int
    arrived: Arrived | None = None
    reachable: bool = False
    store: str = ""
    no_store: str = ""
    running: dict[int, OnExit] = field(default_factory=dict)

    @property
    def peer(self) -> str:
        """The name by which its agent is spoken to; empty before it has come."""
        return self.arrived.life if self.arrived is not None else ""

    @property
    def name(self) -> str:
        """For people: its place and its host name."""
        return f"node {self.node_rank}" + (f" ({self.arrived.hostname})" if self.arrived is not None else "")


@dataclass(frozen=True)
class NodeStatus:
    """One machine of an attached pool.

    Attributes:
        node_rank: Its place.
        hostname: Its name.
        ranks: The ranks that live there.
        reachable: It answers.
        agent_pid: The process that serves the ranks there.
    """

    node_rank: int
    hostname: str
    ranks: tuple[int, ...]
    reachable: bool
    agent_pid: int


def place_for(tag: Arrived, nodes: Sequence[Node]) -> Node | str:
    """Return the place of a machine that has come, or why it gets none.

    An agent that comes back has the place that it had. Another one gets the place that it claims, unless that place is taken by
    an agent that answers; where it claims none, the first to which no machine has come, else the first that is out of reach.
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
    if tag.node_rank >= len(nodes):
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
