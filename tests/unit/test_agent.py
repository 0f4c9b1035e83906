"""An agent's record of the processes on its machine; the test acts as the fork server and the notebook."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from labkit.wire.messages import GroupSpec
from labkit.wire.node_messages import KillRank, OpenWorld, StartRank
from labkit.wire.transport import Keys
from labkit.worker.groups.addresses import NodeClaim
from labkit.worker.machine import rank_starter
from labkit.worker.machine.agent import Agent

GROUP = GroupSpec("tcp://127.0.0.1:1/name", 0, 1)


class Played:
    """An agent whose fork server is this test."""

    def __init__(self, agent: Agent, server: Connection) -> None:
        self.agent, self.server = agent, server

    def notebook_says(self, *messages: Any) -> None:
        for message in messages:
            self.agent._do(message, [])

    def server_says(self, *messages: Any) -> None:
        for message in messages:
            self.server.send(message)
        self.agent._hear_server()

    def asked_of_server(self) -> list[tuple[Any, ...]]:
        found = []
        while self.server.poll(0):
            found.append(self.server.recv())
        return [message for message in found if message[0] == "kill"]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["true"])
    monkeypatch.setattr(rank_starter, "_start_fork_server", lambda: (Connection(ours.detach()), process))
    before = signal.getsignal(signal.SIGTERM)
    agent = Agent("tcp://127.0.0.1:1", Keys.generate(), NodeClaim(), linger_s=1.0, wait_s=1.0)
    server = Connection(theirs.detach())
    try:
        yield Played(agent, server)
    finally:
        agent._end()
        server.close()
        signal.signal(signal.SIGTERM, before)


def start(handle: int, rank: int = 0) -> StartRank:
    return StartRank(handle, rank, rank, 1, "cpu", GROUP, joining=False, defaults=dict(os.environ))


def test_c5_rank_that_is_to_be_killed_before_its_process_is_known_is_killed_when_it_is(played: Played) -> None:
    played.notebook_says(OpenWorld("first"), start(1), start(2, rank=1), KillRank(1), start(3))
    assert played.asked_of_server() == []
    played.server_says(("started", 1, 4001), ("started", 2, 4002), ("started", 3, 4003))
    assert played.asked_of_server() == [("kill", 4001)]
    played.notebook_says(KillRank(3))
    assert played.asked_of_server() == [("kill", 4003)]


def test_c5_process_that_is_known_only_when_its_world_is_closed_is_killed_and_belongs_to_no_other_world(played: Played) -> None:
    played.notebook_says(OpenWorld("first"), start(1), OpenWorld("second"), start(2))
    played.server_says(("started", 1, 4001), ("started", 2, 4002))
    assert played.asked_of_server() == [("kill", 4001)]
    left = played.agent._left()
    assert left is not None
    assert left.ranks == ((2, 0, 4002),)


def test_v3_a_refusal_ends_no_ranks_before_their_time_and_is_told(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever holds the notebook's port can refuse, without knowing any key."""
    agent = played.agent
    agent._met = agent._link.refused = True
    told = "what answers at tcp://127.0.0.1:1 knows another key: copy the notebook's present key file to this machine"
    assert agent._mind_silence() is None
    assert agent._mind_silence() is None
    assert capsys.readouterr().err == f"labkit: {told}. Until then this goes on trying.\n"
    agent._silent_s = agent._linger_s + 0.1
    assert agent._mind_silence() == told
