"""Limits what strangers can take up at the port where machines find a notebook.

Whoever reaches the port can connect before it proves anything. Each connection is a descriptor of the notebook's process, and
ZeroMQ has no limit for them. So:

* Linux passes on a connection only when something has come through it, as it does at once from an agent. Silent ones wait in
  the system for some seconds.
* A connection that has not proved its key after HANDSHAKE_MS is closed, by ZeroMQ's own threads.
* Of connections younger than that there are at most YOUNG and two for each machine that is expected. What comes beyond is shut
  down at once. Older ones have proved the key, so machines that are connected go on. While somebody floods the port, new ones
  may have to try more than once.
* A frame larger than MOST_BYTES ends its connection before memory is set aside for it.
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
# What is sent is cut into pieces of this size; encryption adds some bytes.
PIECE_BYTES = 1 << 20
MOST_BYTES = PIECE_BYTES + 1024
_DEFER_S = 3
_EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED


class Door:
    """Watches over a socket that listens on TCP. To be made before it is bound.

    Args:
        listener: The socket; this sets its limits.
        num_peers: How many machines are expected.
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
        """Stop watching; the socket is about to be closed."""
        self._listener.disable_monitor()
        self._thread.join(5.0)

    def _watch(self) -> None:
        try:
            while (event := recv_monitor_message(self._monitor))["event"] != zmq.EVENT_MONITOR_STOPPED:
                with contextlib.suppress(OSError):  # it is closed by now
                    self._take(event["event"], os.dup(event["value"]))
        except zmq.ZMQError:
            pass  # the context has ended
        self._monitor.close(0)

    def _take(self, event: int, fd: int) -> None:
        """A copy of the descriptor, which is closed here: the number itself may stand for something else by now."""
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
