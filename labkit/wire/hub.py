"""The link between the controller and the machines of an attached pool: one encrypted TCP port, one connection for each machine.

On each machine an agent (:mod:`labkit.worker.machine.agent`) sits between this connection and the ranks, which speak to it as the
ranks of a local pool speak to their controller. So a message for all ranks of a machine crosses the network once, and ranks run the
same code in every pool.

A message is a pickled tag, the pickled message itself, and frames with its large buffers. Frames travel in pieces, because ZeroMQ's
heartbeats can only pass between two pieces: a piece that took longer than the heartbeat time-out would end the connection.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from labkit.wire.door import MOST_BYTES, PIECE_BYTES, Door
from labkit.wire.node_messages import FromNode, ToNode
from labkit.wire.transport import Keys, guarded_context
from labkit.wire.wake import Wake

# ZeroMQ's own threads exchange heartbeats, even while Python is busy. A connection that is silent for SILENCE_MS is lost.
HEARTBEAT_MS = 1000
SILENCE_MS = 3000
QUEUED_MESSAGES = 1000
# How long a closed hub keeps sending queued messages.
LINGER_MS = 1000
AGAIN_S = 1.0


class Hub:
    """The controller's end. One thread at a time sends and receives; :meth:`wake` may be called from anywhere.

    Args:
        address: ``tcp://INTERFACE:PORT``; port ``*`` takes a free one.
        keys: The pool's keys.
        num_peers: The number of machines expected.

    Attributes:
        port: The port.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, address: str, keys: Keys, num_peers: int = 1) -> None:
        with contextlib.ExitStack() as undo:
            self._context, self._auth = guarded_context(keys, undo)
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.server_public, keys.server_secret
            self._socket.zap_domain = b"labkit"
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            _prepare(self._socket)
            self._door = Door(self._socket, num_peers)
            undo.callback(self._door.close)
            try:
                self._socket.bind(address)
            except zmq.ZMQError as error:
                raise OSError(error.errno, error.strerror) from None
            self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            self._wake = Wake()
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(self._wake.fd, zmq.POLLIN)
            undo.pop_all()

    def send(self, peer: str, tag: ToNode, *parts: Any) -> bool:
        """Send to the agent of that name. Return False if it is not connected or has a thousand messages queued."""
        try:
            message = [peer.encode(), *_in_pieces([pickle.dumps(tag, protocol=5), *parts])]
            self._socket.send_multipart(message, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return False
            raise
        return True

    def receive(self, timeout_s: float) -> list[tuple[str, FromNode, list[bytes]]]:
        """Wait for messages: (agent's name, tag, further parts). Return an empty list after the time-out or a :meth:`wake`."""
        try:
            ready = dict(self._poller.poll(max(0, int(timeout_s * 1000 + 0.999))))
        except zmq.ZMQError as error:
            if error.errno == errno.EINTR:
                return []
            raise
        if self._wake.fd in ready:
            self._wake.hear()
        received: list[tuple[str, FromNode, list[bytes]]] = []
        while self._socket in ready and len(received) < QUEUED_MESSAGES:
            try:
                identity, *pieces = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            tag, *parts = _put_together(pieces)
            received.append((identity.decode(errors="replace"), pickle.loads(tag), parts))
        return received

    def wake(self) -> None:
        """Make a waiting :meth:`receive` return. Safe from any thread and signal handler, also after :meth:`close`."""
        self._wake.ring()

    def close(self) -> None:
        """Close the port. Blocks for at most a second while queued messages are being sent."""
        if not self._wake.close():
            return
        self._door.close()
        self._socket.close(LINGER_MS)
        self._auth.stop()
        self._context.term()


class HubLink:
    """The agent's end. It comes back after whatever answers at the address, which may be a neighbour who has taken a free port.

    Args:
        address: The hub's address, ``tcp://host:port``.
        keys: The server's public key and the client's two keys.
        name: The agent's name, which must be unique.

    Attributes:
        socket: The socket to poll for messages, and for room to send.
        monitor: The socket to poll for changes of the connection.
        connected: Whether the hub is connected.
        refused: Whether what answers rejects the key. Anybody can say that, without knowing any key.

    """

    def __init__(self, address: str, keys: Keys, name: str) -> None:
        with contextlib.ExitStack() as undo:
            self._context = zmq.Context()
            undo.callback(self._context.destroy, 0)
            self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            self.socket.curve_serverkey = keys.server_public
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.client_public, keys.client_secret
            self.socket.setsockopt(zmq.IDENTITY, name.encode())
            self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            self.socket.setsockopt(zmq.HANDSHAKE_IVL, SILENCE_MS)
            self.socket.setsockopt(zmq.CONNECT_TIMEOUT, SILENCE_MS)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)  # before a key is proved, too
            _prepare(self.socket)
            self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket()
            self.connected = self.refused = False
            self._address, self._lost_at = address, 0.0
            self.socket.connect(address)
            undo.pop_all()

    def look(self) -> bool:
        """Process the connection's events. Return True if a connection has been made since the last call and still exists."""
        made = False
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, made, self.refused = True, True, False
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected, made, self._lost_at = False, False, time.monotonic()
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self._lost_at = 0.0
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.refused = True
        if self._lost_at and time.monotonic() > self._lost_at + AGAIN_S:
            self._connect_again()
        return made

    def _connect_again(self) -> None:
        """Do what ZeroMQ leaves out after an answer that is no handshake, or a refusal: it gives the address up."""
        self._lost_at = 0.0
        with contextlib.suppress(zmq.ZMQError):  # it no longer knows the address
            self.socket.disconnect(self._address)
        self.socket.connect(self._address)

    def receive(self) -> tuple[ToNode, list[bytes]] | None:
        """Return the next message and its further parts, or None."""
        try:
            tag, *parts = _put_together(self.socket.recv_multipart(flags=zmq.NOBLOCK))
        except zmq.Again:
            return None
        return pickle.loads(tag), parts

    def send(self, parts: Sequence[Any]) -> bool:
        """Send a message. Return False if there is no room now."""
        try:
            self.socket.send_multipart(_in_pieces(parts), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Send queued messages for at most a second, and close."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(LINGER_MS)
        self._context.term()


def _in_pieces(parts: Sequence[Any]) -> list[Any]:
    """Return the number of pieces of each part, then the pieces."""
    views = [memoryview(part).cast("B") for part in parts]
    pieces = [[view[begin : begin + PIECE_BYTES] for begin in range(0, view.nbytes, PIECE_BYTES)] or [view] for view in views]
    counts = ",".join(str(len(found)) for found in pieces).encode()
    return [counts, *(piece for found in pieces for piece in found)]


def _put_together(pieces: list[bytes]) -> list[bytes]:
    parts, place = [], 1
    for count in map(int, pieces[0].split(b",")):
        parts.append(pieces[place] if count == 1 else b"".join(pieces[place : place + count]))
        place += count
    return parts


def _prepare(socket: zmq.Socket[bytes]) -> None:
    socket.linger = LINGER_MS
    socket.set_hwm(QUEUED_MESSAGES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)
