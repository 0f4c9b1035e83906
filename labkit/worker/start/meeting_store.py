"""The store in which the ranks of an attached pool meet: a separate process on the machine of node 0.

torch's TCPStore does not authenticate anybody. So it listens on only one address, and the ranks learn that address through labkit's
own encrypted connections. The ranks store addresses and JSON in it; nothing from it is unpickled.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import NoReturn

# The number of the store's process among the fork server's children, which are otherwise ranks.
RANK = -1


def listen(host: str) -> tuple[socket.socket, str]:
    """Listen on a free port of one address of this machine. Return the socket and ``tcp://host:port``.

    Raises:
        OSError: The address cannot be bound.
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
    """Serve the store until this process is killed, as happens when the fork server ends."""
    from torch._C import _distributed_c10d as _c10d

    host, port = listener.getsockname()[:2]
    _store = _c10d.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    # From now on it only writes about strangers who connect: a pipe that is not read would fill up and block it.
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null, fd)
    while True:
        signal.pause()
