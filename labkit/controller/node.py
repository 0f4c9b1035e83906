"""One machine of an attached pool, as the notebook knows it."""

from __future__ import annotations

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
        fault: Why it can start no ranks; empty when it can.
        running: By number, what to call when a process that was started there has ended.
    """

    node_rank: int
    arrived: Arrived | None = None
    reachable: bool = False
    fault: str = ""
    running: dict[int, OnExit] = field(default_factory=dict)

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


def refusal_of(tag: Arrived, num_nodes: int) -> str:
    """Why a machine that says this of itself cannot be one of so many; empty where it can."""
    if tag.num_nodes != num_nodes:
        return f"torchrun runs on {tag.num_nodes} machines, and the notebook attaches {num_nodes}: make both equal"
    if tag.num_here != 1:
        return f"torchrun has started {tag.num_here} agents there. Start one (--nproc-per-node 1): it starts the ranks"
    mine = versions()
    differ = [f"{name} {version} (here {mine[name]})" for name, version in tag.versions.items() if mine.get(name) != version]
    return f"it has {', '.join(differ)}: install the same on every machine" if differ else ""
