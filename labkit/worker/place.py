"""An agent's machine: its place among the others, and the network device on the way to them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from labkit.errors import WorkerStartError


@dataclass(frozen=True)
class Place:
    """This machine's place among those that torchrun has brought together.

    Attributes:
        node_rank: From 0.
        num_nodes: How many machines there are.
        num_here: How many agents torchrun has started on this one.
        store: ``tcp://host:port`` of torchrun's store.
        restarts: How often torchrun has started its workers anew.
    """

    node_rank: int
    num_nodes: int
    num_here: int
    store: str
    restarts: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Place:
        """Read what torchrun has set.

        Raises:
            WorkerStartError: This process was not started by torchrun.
        """
        try:
            return cls(
                node_rank=int(environ["GROUP_RANK"]),
                num_nodes=int(environ["GROUP_WORLD_SIZE"]),
                num_here=int(environ["LOCAL_WORLD_SIZE"]),
                store=f"tcp://{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
                restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        except KeyError as error:
            raise WorkerStartError(
                f"{error} is not set: start this with torchrun, by the command that WorkerPool.attach() shows"
            ) from None


def gloo_device(store: str, notebook: str) -> str | None:
    """The network device on the way to the other machines; None where gloo has to find it itself.

    Args:
        store: ``tcp://host:port`` of torchrun's store.
        notebook: ``tcp://host:port`` of the notebook.
    """
    host = _host(store)
    if host in ("127.0.0.1", "localhost"):
        return _device_of("127.0.0.1")  # machines that are played on one
    for place in (host, _host(notebook)):
        own = _own_address_towards(place)
        if own is not None and not own.startswith("127."):  # some host names stand for the loopback device at home
            return _device_of(own)
    return None


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _own_address_towards(host: str) -> str | None:
    """This machine's address on the way to a host; None where there is no way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _device_of(own: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.partition("%")[0] == own for item in addresses):
            return name
    return None
