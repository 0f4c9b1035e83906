"""Another user of this machine, who tries to be a peer of gloo, or to use up its descriptors.

Usage as root: ``python neighbour.py race UID FLAG`` or ``python neighbour.py flood COUNT PORT...``. It runs as nobody (uid 65534).

``race``: while the file FLAG exists it connects to each port of UID's that starts to listen on loopback, in several ways, and sends
the numbers that ranks send. When its standard input ends it prints a line of JSON with the number of ports that it reached and of
bytes that it was sent. ``flood``: it opens COUNT connections to each port, prints how many of them stay open, and holds them until
its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534
NUMBERS = range(6)
STANDS_WITHIN_S = 2.0
_LISTENS = "0A"


def listeners(uid: str) -> Iterator[tuple[str, int]]:
    """(inode, port) of each socket of a user that listens on 127.0.0.1."""
    with open("/proc/net/tcp", "rb", 0) as file:
        text = file.read(1 << 20).decode()
    for line in text.splitlines()[1:]:
        words = line.split()
        if words[3] == _LISTENS and words[7] == uid and words[1].startswith("0100007F"):
            yield words[9], int(words[1].partition(":")[2], 16)


def connect(port: int, way: int) -> socket.socket:
    """Connect as any program does, from another address of the loopback device, or with a socket for IPv6."""
    peer = socket.socket(socket.AF_INET6 if way == 2 else socket.AF_INET)
    peer.settimeout(1.0)
    if way == 1:
        peer.bind(("127.0.0.2", 0))
    peer.connect(("::ffff:127.0.0.1" if way == 2 else "127.0.0.1", port))
    return peer


def race(uid: str, flag: str, folder: int) -> dict[str, int]:
    """Connect before the rank that is expected."""

    def may_act() -> bool:
        return os.access(flag, os.F_OK, dir_fd=folder)

    seen: set[str] = {inode for inode, _ in listeners(uid)}
    held: list[socket.socket] = []
    came = received = 0
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        fresh = [(inode, port) for inode, port in listeners(uid) if inode not in seen] if may_act() else []
        for inode, port in fresh:
            seen.add(inode)
            came += 1
            for number in NUMBERS:
                with contextlib.suppress(OSError):
                    held.append(connect(port, number % 3))
                    held[-1].sendall(struct.pack("<q", number))
                    held[-1].setblocking(False)
        for peer in held:
            with contextlib.suppress(OSError):
                received += len(peer.recv(4096))
        time.sleep(0 if may_act() else 0.01)
    return {"came": came, "received": received}


def flood(count: int, ports: list[int]) -> dict[str, int]:
    """Open connections that say nothing."""
    held = []
    for port in ports:
        for _ in range(count):
            peer = socket.socket()
            peer.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                peer.connect(("127.0.0.1", port))
            held.append(peer)
    deadline = time.monotonic() + STANDS_WITHIN_S
    while time.monotonic() < deadline and sum(map(stands, held)) < len(held):
        time.sleep(0.1)
    print(json.dumps({"standing": sum(map(stands, held)), "tried": len(held)}), flush=True)
    sys.stdin.read()
    return {}


def stands(peer: socket.socket) -> bool:
    """Return whether the connection has been made and not been closed."""
    try:
        peer.getpeername()
    except OSError:
        return False
    return True


def main() -> None:
    """Become nobody, and do what the command line says."""
    what, *args = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flag = Path(args[1])
    folder = os.open(flag.parent, os.O_RDONLY) if what == "race" else -1  # nobody may enter the folders above it
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    found = race(args[0], flag.name, folder) if what == "race" else flood(int(args[0]), list(map(int, args[1:])))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
