"""The store in which the ranks of an attached pool meet: a process of its own, on the machine of node 0.

torch's TCPStore asks nobody for a key. So it listens on one address alone, and the ranks learn that address through labkit's
own encrypted connections. What they leave in it are addresses and JSON; nothing of it is unpickled.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import NoReturn

# The store's process among the children of the fork server, which are ranks otherwise.
RANK = -1


def listen(host: str) -> tuple[socket.socket, str]:
    """Listen on a free port of one address of this machine; returns the socket and ``tcp://host:port``.

    Raises:
        OSError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError:
        listener.close()
        raise
    port = listener.getsockname()[1]
    return listener, f"tcp://[{host}]:{port}" if family == socket.AF_INET6 else f"tcp://{host}:{port}"


def serve(listener: socket.socket) -> NoReturn:
    """Serve the store until this process is killed, as it is when the fork server ends."""
    from torch._C import _distributed_c10d as _c10d

    host, port = listener.getsockname()[:2]
    _store = _c10d.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    # What it writes from now on it writes about strangers who connect: a pipe that nobody reads would fill up and stop it.
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null, fd)
    while True:
        signal.pause()
