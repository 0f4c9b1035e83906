"""The node rank that an agent claims, and the network addresses on the way to the other machines."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from labkit.errors import InvalidPoolError

# The variables in which schedulers say which machine of a job this is: SLURM, and an indexed job of Kubernetes.
SCHEDULER_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class NodeClaim:
    """The node rank that this machine claims, if it claims one.

    Attributes:
        node_rank: The node rank, from 0; None for the first one that is free.
        source: The origin of this information, for people.
    """

    node_rank: int | None = None
    source: str = ""


def node_claim(option: int | None, environ: Mapping[str, str]) -> NodeClaim:
    """Return the claimed node rank: that of ``--node-rank``, else of the scheduler's variable, else none.

    Machines that claim none are numbered by the notebook in the order in which they connect. It refuses a rank that another machine
    has, or that the pool does not have.

    Raises:
        InvalidPoolError: A variable is not a number, or two variables differ.
    """
    if option is not None:
        return NodeClaim(option, "--node-rank")
    found = {name: environ[name] for name in SCHEDULER_VARIABLES if environ.get(name)}
    for name, text in found.items():
        if not (text.isascii() and text.isdigit()):
            raise InvalidPoolError(f"{name}={text!r} is no node rank. Say which machine this is: --node-rank N, from 0")
    if len({int(text) for text in found.values()}) > 1:
        said = " and ".join(f"{name}={text}" for name, text in found.items())
        raise InvalidPoolError(f"{said} contradict each other. Say which machine this is: --node-rank N, from 0")
    return next((NodeClaim(int(text), name) for name, text in found.items()), NodeClaim())


def store_host(others: Sequence[str], notebook: str, environ: Mapping[str, str]) -> str:
    """Return the one address of this machine on which the ranks' store listens, if there are other machines.

    It is the address of the device in ``GLOO_SOCKET_IFNAME``; else the address on the way to the notebook; else, if the notebook is
    on this machine or reached through a tunnel, the address on the way to the first other machine that is not in the same position.

    Args:
        others: The addresses of the other machines on their way to the notebook.
        notebook: ``tcp://host:port`` of the notebook.
        environ: This agent's environment.

    Raises:
        InvalidPoolError: None of these addresses leads to another machine.
    """
    device = environ.get(INTERFACE, "").partition(",")[0]
    if device:
        own = addresses_of(device)
        if not own:
            raise InvalidPoolError(f"{INTERFACE}={device}, and this machine has no such network device with an address")
        return own[0]
    for host in (host_of(notebook), *(other for other in others if other and not _is_loopback(other))):
        own_address = address_towards(host)
        if own_address and not _is_loopback(own_address):
            return own_address
    raise InvalidPoolError(
        f"it does not know which network device leads to the other machines: set {INTERFACE} for its labkit process, "
        "to that device's name (the loopback device's where all run on one machine)"
    )


def gloo_device(store: str) -> str | None:
    """Return the network device on the way to the ranks' store; None if gloo has to find it itself.

    Args:
        store: ``tcp://host:port`` of the store, with an address as its host.
    """
    own = address_towards(host_of(store))
    for name in psutil.net_if_addrs():
        if own and own in addresses_of(name):
            return name
    return None


def host_of(address: str) -> str:
    """Return the host in ``tcp://host:port``."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def address_towards(host: str) -> str:
    """Return this machine's address on the way to a host; empty if there is no route."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def addresses_of(device: str) -> list[str]:
    """Return a device's addresses, IPv4 first, without IPv6 addresses that are valid on one link only."""
    found = [item for item in psutil.net_if_addrs().get(device, []) if item.family in (socket.AF_INET, socket.AF_INET6)]
    return [item.address for item in sorted(found, key=lambda item: item.family != socket.AF_INET) if "%" not in item.address]
