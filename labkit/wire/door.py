"""Limits on the resources that strangers can take at the port where machines reach a notebook.

Anyone who reaches the port can connect before proving anything. Each connection takes a descriptor of the notebook's process, and
ZeroMQ does not limit their number. So:

* Linux passes on a connection only when data has come through it. An agent sends data at once. Silent connections wait in the
  operating system for a few seconds.
* ZeroMQ's own threads close a connection that has not proved its key after HANDSHAKE_MS.
* At most YOUNG connections, plus two for each expected machine, may be younger than that. Any further one is shut down at once.
  Older ones have proved the key, so connected machines are not affected. While the port is being flooded, a new machine may have
  to retry.
* A frame larger than MOST_BYTES ends its connection before memory is allocated for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_MS = 3000
YOUNG = 128
# Messages are cut into pieces of this size; encryption adds some bytes.
PIECE_BYTES = 1 << 20
MOST_BYTES = PIECE_BYTES + 1024
_DEFER_S = 3
_EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED


class Door:
    """A guard on a listening TCP socket. Create it before binding the socket.

    Args:
        listener: The socket; the constructor sets its limits.
        num_peers: The number of machines expected.
    """

    def __init__(self, listener: zmq.Socket[bytes], num_peers: int) -> None:
        listener.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        listener.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._listener = listener
        self._monitor: zmq.Socket[bytes] = listener.get_monitor_socket(_EVENTS)
        self._young: list[float] = []
        self._most_young = YOUNG + 2 * num_peers
        self._port = 0
        self._thread = threading.Thread(target=self._watch, name="labkit-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Call this just before the socket is closed."""
        self._listener.disable_monitor()
        self._thread.join(5.0)

    def _watch(self) -> None:
        try:
            while (event := recv_monitor_message(self._monitor))["event"] != zmq.EVENT_MONITOR_STOPPED:
                with contextlib.suppress(OSError):  # already closed
                    self._take(event["event"], os.dup(event["value"]))
        except zmq.ZMQError:
            pass  # the context has ended
        self._monitor.close(0)

    def _take(self, event: int, fd: int) -> None:
        """Handle an event through a copy of its descriptor and close the copy. The original number may be another file's by now."""
        try:
            own = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            raise
        with own:
            if event == zmq.EVENT_LISTENING:
                self._port = own.getsockname()[1]
                if sys.platform == "linux":
                    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_S)
            elif own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] == self._port:
                self._let_in(own)

    def _let_in(self, connection: socket.socket) -> None:
        now = time.monotonic()
        self._young = [moment for moment in self._young if now - moment < HANDSHAKE_MS / 1000]
        if len(self._young) < self._most_young:
            self._young.append(now)
        else:
            connection.shutdown(socket.SHUT_RDWR)
