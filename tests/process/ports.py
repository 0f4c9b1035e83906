"""The sockets of processes to which others can connect, in any network namespace."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable

_LISTEN, _UNCONNECTED = "0A", "07"


def listening(pids: Iterable[int]) -> dict[tuple[str, int], str]:
    """Address, port and protocol of every TCP socket that listens, and of every UDP socket that accepts data from anybody."""
    found = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            inodes = _socket_inodes(pid)
            for protocol, state in (("tcp", _LISTEN), ("tcp6", _LISTEN), ("udp", _UNCONNECTED), ("udp6", _UNCONNECTED)):
                for line in open(f"/proc/{pid}/net/{protocol}").read().splitlines()[1:]:  # noqa: SIM115
                    words = line.split()
                    if words[3] == state and words[9] in inodes:
                        address, port = words[1].split(":")
                        found[_address(address), int(port, 16)] = protocol
    return found


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def _address(text: str) -> str:
    """An address as /proc/net writes it: words of four bytes in the machine's own order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
