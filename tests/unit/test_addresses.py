"""The number of a machine in an attached pool, and the address on which the ranks' store listens."""

from __future__ import annotations

import socket
from collections import namedtuple

import psutil
import pytest

from labkit.controller.machines.node import Node, place_for
from labkit.errors import InvalidPoolError
from labkit.wire.node_messages import Arrived
from labkit.wire.versions import versions
from labkit.worker.groups import addresses
from labkit.worker.groups.addresses import NodeClaim, gloo_device, node_claim, store_host

Address = namedtuple("Address", "family address")

# A machine with a network towards a login node (192.0.2.0/24) and one towards the others (10.0.0.0/24).
DEVICES = {
    "lo": [Address(socket.AF_INET, "127.0.0.1"), Address(socket.AF_INET6, "::1")],
    "login0": [Address(socket.AF_INET, "192.0.2.7")],
    "ib0": [Address(socket.AF_INET6, "fe80::1%ib0"), Address(socket.AF_INET6, "2001:db8::7"), Address(socket.AF_INET, "10.0.0.7")],
    "tunnel0": [],
}
WAYS = {"login": "192.0.2.7", "10.0.0.8": "10.0.0.7", "10.0.0.7": "10.0.0.7", "127.0.0.1": "127.0.0.1", "this": "127.0.0.1"}


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: DEVICES)
    monkeypatch.setattr(addresses, "address_towards", lambda host: WAYS.get(host, ""))


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        (None, {}, NodeClaim()),
        (None, {"SLURM_NODEID": "3"}, NodeClaim(3, "SLURM_NODEID")),
        (None, {"JOB_COMPLETION_INDEX": "2"}, NodeClaim(2, "JOB_COMPLETION_INDEX")),
        (None, {"SLURM_NODEID": "1", "JOB_COMPLETION_INDEX": "1"}, NodeClaim(1, "SLURM_NODEID")),
        (None, {"SLURM_NODEID": "", "RANK": "5", "SLURM_PROCID": "5"}, NodeClaim()),
        (0, {"SLURM_NODEID": "3", "JOB_COMPLETION_INDEX": "x"}, NodeClaim(0, "--node-rank")),
    ],
)
def test_s1_the_node_rank_is_the_option_s_else_the_scheduler_s_else_none(
    option: int | None, environ: dict[str, str], expected: NodeClaim
) -> None:
    assert node_claim(option, environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SLURM_NODEID": "-1"}, "SLURM_NODEID='-1' is no node rank. Say which machine this is: --node-rank N"),
        ({"JOB_COMPLETION_INDEX": "first"}, "JOB_COMPLETION_INDEX='first' is no node rank"),
        ({"SLURM_NODEID": "²"}, "is no node rank"),
        (
            {"SLURM_NODEID": "1", "JOB_COMPLETION_INDEX": "0"},
            "SLURM_NODEID=1 and JOB_COMPLETION_INDEX=0 contradict each other. Say which machine this is: --node-rank N",
        ),
    ],
)
def test_s1_a_scheduler_s_variable_that_cannot_be_meant_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidPoolError) as caught:
        node_claim(None, environ)
    assert message in str(caught.value)


def arrived(life: str, node_rank: int | None = None, source: str = "SLURM_NODEID") -> Arrived:
    return Arrived(node_rank, source if node_rank is not None else "", life, f"host-{life}", 41, "", 0, versions())


def seated(*lives: str, lost: str = "") -> list[Node]:
    """Machines in the places of these agents; a place without an agent is empty."""
    return [Node(number, arrived(life) if life else None, bool(life) and life != lost) for number, life in enumerate(lives)]


def test_s1_machines_that_claim_no_place_get_the_free_ones_in_the_order_in_which_they_come() -> None:
    nodes = [Node(0), Node(1)]
    for number, life in enumerate(("a", "b")):
        node = place_for(arrived(life), nodes)
        assert node is nodes[number]
        node.arrived, node.reachable = arrived(life), True
    assert place_for(arrived("c"), nodes) == "the pool has its 2 machines already"


@pytest.mark.parametrize(
    ("nodes", "tag", "place"),
    [
        (seated("", "", ""), arrived("a", 2), 2),
        (seated("", "b"), arrived("b", 0), 1),  # it keeps its place, whatever it claims
        (seated("a", "b", lost="b"), arrived("b", 1), 1),
        (seated("a", "b", lost="b"), arrived("c", 1), 1),
        (seated("a", "b", lost="b"), arrived("c"), 1),
        (seated("a", "", lost="a"), arrived("c"), 1),  # the one that is out of reach may come back
    ],
)
def test_s1_a_machine_gets_its_own_place_or_a_free_one(nodes: list[Node], tag: Arrived, place: int) -> None:
    assert place_for(tag, nodes) is nodes[place]


@pytest.mark.parametrize(
    ("nodes", "tag", "message"),
    [
        (seated("", ""), arrived("a", 2), "SLURM_NODEID says that it is node 2, and the notebook attaches 2, counted from 0: make"),
        (
            seated("a", ""),
            arrived("b", 0, "--node-rank"),
            "--node-rank says that it is node 0, which process 41 on host-a is. Start one labkit process on each machine, and give "
            "every one its --node-rank or none",
        ),
    ],
)
def test_s1_a_place_that_is_taken_or_not_there_is_refused(nodes: list[Node], tag: Arrived, message: str) -> None:
    refusal = place_for(tag, nodes)
    assert isinstance(refusal, str)
    assert refusal.startswith(message)


def test_a_machine_with_other_versions_is_refused() -> None:
    tag = Arrived(None, "", "a", "host", 41, "", 0, versions() | {"labkit": "0.0.1"})
    refusal = place_for(tag, [Node(0)])
    assert isinstance(refusal, str)
    assert refusal.startswith("it has labkit 0.0.1 (here ")


@pytest.mark.parametrize(
    ("others", "notebook", "environ", "host"),
    [
        (["10.0.0.8"], "tcp://login:1", {}, "192.0.2.7"),
        (["10.0.0.8"], "tcp://login:1", {"GLOO_SOCKET_IFNAME": "ib0,login0"}, "10.0.0.7"),
        (["", "127.0.0.1", "10.0.0.8"], "tcp://this:1", {}, "10.0.0.7"),
        (["10.0.0.8"], "tcp://127.0.0.1:1", {}, "10.0.0.7"),
        (["127.0.0.1"], "tcp://127.0.0.1:1", {"GLOO_SOCKET_IFNAME": "lo"}, "127.0.0.1"),
    ],
)
def test_s1_the_store_listens_on_one_address_that_leads_to_the_other_machines(
    others: list[str], notebook: str, environ: dict[str, str], host: str
) -> None:
    assert store_host(others, notebook, environ) == host


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "it does not know which network device leads to the other machines: set GLOO_SOCKET_IFNAME"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "GLOO_SOCKET_IFNAME=eth9, and this machine has no such network device"),
        ({"GLOO_SOCKET_IFNAME": "tunnel0"}, "this machine has no such network device with an address"),
    ],
)
def test_s1_a_store_whose_way_is_not_known_listens_nowhere(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidPoolError) as caught:
        store_host(["127.0.0.1"], "tcp://127.0.0.1:1", environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("store", "device"),
    [("tcp://10.0.0.8:5", "ib0"), ("tcp://login:5", "login0"), ("tcp://127.0.0.1:5", "lo"), ("tcp://203.0.113.1:5", None)],
)
def test_gloo_uses_the_device_on_the_way_to_the_store(store: str, device: str | None) -> None:
    assert gloo_device(store) == device


@pytest.mark.parametrize("node_rank", [-1, 2])
def test_h6_a_machine_that_claims_a_place_that_the_pool_has_not_gets_none(node_rank: int) -> None:
    assert "counted from 0" in str(place_for(arrived("c", node_rank), seated("", "")))
