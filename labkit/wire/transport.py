"""Messages between ranks and the controller or agent on their machine: ZeroMQ on Unix sockets, authenticated with CURVE.

The controller binds two sockets, and each worker connects three to them:

* ``commands`` (ROUTER): one DEALER of the worker's main thread for work, one of its control thread for requests and interrupts.
  They are separate so that the control thread still receives messages when the main thread is stuck.
* ``events`` (PULL): one PUSH of the worker for output and results. The main thread and the output thread share it under a lock, so
  a result can never overtake the output before it.

Messages are pickles, so strangers must not send any: the controller accepts only peers that prove the pool's client key. The
sockets are in a directory with mode 0700; no port is opened. For messages to other machines see :mod:`labkit.wire.hub`.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import zmq
import zmq.auth.thread

from labkit.errors import WireError
from labkit.wire.messages import FromWorker, ToControl, ToMain
from labkit.wire.wake import Wake

# Output is sent in pieces of at most 64 KiB (see worker/capture.py), so a queue holds at most a few MiB a rank. A rank that writes
# faster than the notebook reads waits in its own print.
QUEUED_MESSAGES = 64
# Messages queued in a worker are lost when it dies. The copy of its last output (see wire/pipes.py) has room for this many pieces.
QUEUED_EVENTS = 4

Channel = Literal["main", "control"]


@dataclass(frozen=True, slots=True)
class Keys:
    """The CURVE keys of one pool, each 40 characters of Z85."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def generate(cls) -> Keys:
        """Make fresh keys."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(server_public, server_secret, client_public, client_secret)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and keys with which a worker reaches its controller. It holds the client key: keep it private.

    Attributes:
        commands: Address of the ROUTER socket.
        events: Address of the PULL socket.
        server_public: The controller's public key.
        client_public: The workers' public key.
        client_secret: The workers' secret key.
    """

    commands: str
    events: str
    server_public: bytes
    client_public: bytes
    client_secret: bytes


class OneKey:
    """Credentials for ZeroMQ's authenticator, which accept exactly one client key."""

    def __init__(self, client_public: bytes) -> None:
        self._good = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether to accept a peer's key. The authenticator calls this."""
        return key == self._good


def guarded_context(keys: Keys, undo: contextlib.ExitStack) -> tuple[zmq.Context[zmq.Socket[bytes]], Any]:
    """Make a context whose server sockets accept only peers with the pool's client key, and the authenticator that checks it.

    Args:
        keys: The pool's keys.
        undo: Receives the callbacks that close both. A context with open sockets waits for them for ever when it is
            garbage-collected, so a constructor that fails half way has to close them.
    """
    context = zmq.Context()
    undo.callback(context.destroy, 0)
    authenticator = zmq.auth.thread.ThreadAuthenticator(context)
    authenticator.start()
    undo.callback(authenticator.stop)
    authenticator.configure_curve_callback(domain="labkit", credentials_provider=OneKey(keys.client_public))
    return context, authenticator


class ControllerWire:
    """The controller's end.

    Not thread safe except for :meth:`wake`: one thread at a time sends and receives.

    Args:
        directory: The folder for the sockets; other users cannot enter it.
        keys: The pool's keys.
    """

    def __init__(self, directory: str, keys: Keys) -> None:
        with contextlib.ExitStack() as undo:
            self._context, self._auth = guarded_context(keys, undo)
            self._commands = self._server(zmq.ROUTER, keys)
            # Without this flag a message to a rank that is not connected would vanish silently.
            self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._commands.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._events = self._server(zmq.PULL, keys)
            addresses = f"ipc://{directory}/commands", f"ipc://{directory}/events"
            for socket, address in zip((self._commands, self._events), addresses, strict=True):
                socket.bind(address)
            self.endpoint = Endpoint(*addresses, keys.server_public, keys.client_public, keys.client_secret)
            self._wake = Wake()
            self._poller = zmq.Poller()
            for source in (self._events, self._commands, self._wake.fd):
                self._poller.register(source, zmq.POLLIN)
            undo.pop_all()
        # Keep the last pickled message, because one message goes to many ranks.
        self._pickled: tuple[ToMain | ToControl, bytes] | None = None

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets that :meth:`receive` reads, for a poller that also waits for others."""
        return self._events, self._commands

    def _server(self, kind: int, keys: Keys) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.server_public, keys.server_secret
        socket.zap_domain = b"labkit"
        socket.linger = 0
        socket.set_hwm(QUEUED_MESSAGES)
        return socket

    def send(self, ranks: Sequence[int], channel: Channel, message: ToMain | ToControl, frames: Sequence[Any] = ()) -> None:
        """Send one message. Blocks for at most 5 s per rank while its queue is full, but never for a control thread.

        A rank that is no longer connected gets nothing. Nor does a control thread whose queue is full: requests and interrupts are
        repeated, and a run must not fail because a rank is busy.

        Args:
            ranks: The receivers.
            channel: Their main or their control threads.
            message: The message.
            frames: Buffers that follow it (payloads packed without shared memory).

        Raises:
            WireError: A rank's main thread has taken no message for 5 s.
        """
        if self._pickled is None or self._pickled[0] is not message:
            self._pickled = message, pickle.dumps(message, protocol=5)
        for rank in ranks:
            self._send_to(rank, channel, [_identity(rank, channel), self._pickled[1], *frames])

    def _send_to(self, rank: int, channel: Channel, parts: list[Any]) -> None:
        deadline = time.monotonic() + 5.0
        while True:
            try:
                self._commands.send_multipart(parts, flags=zmq.NOBLOCK, copy=len(parts) == 2)
                return
            except zmq.Again:
                if channel == "control":
                    return
                if time.monotonic() > deadline:
                    raise WireError(f"rank {rank} has taken no message for 5 s. pool.diagnose() shows what it is doing.") from None
                self._commands.poll(50, zmq.POLLOUT)
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    return
                raise

    def receive(self, timeout_s: float) -> list[tuple[FromWorker, list[bytes]]]:
        """Wait for messages of the workers.

        Args:
            timeout_s: The longest time to wait; 0 returns at once.

        Returns:
            The messages that have arrived, each with its extra frames; empty after the time-out or a :meth:`wake`.
        """
        try:
            ready = dict(self._poller.poll(max(0, int(timeout_s * 1000 + 0.999))))
        except zmq.ZMQError as error:
            if error.errno == errno.EINTR:
                return []
            raise
        if self._wake.fd in ready:
            self._wake.hear()
        received: list[tuple[FromWorker, list[bytes]]] = []
        if self._events in ready:
            self._take(self._events, 0, received)
        if self._commands in ready:
            self._take(self._commands, 1, received)
        return received

    @staticmethod
    def _take(socket: zmq.Socket[bytes], skip: int, into: list[tuple[FromWorker, list[bytes]]]) -> None:
        # Limit one call, so that a flood on one socket cannot starve the other or delay the caller's deadlines.
        for _ in range(QUEUED_MESSAGES):
            try:
                parts = socket.recv_multipart(flags=zmq.NOBLOCK)[skip:]
            except zmq.Again:
                return
            into.append((pickle.loads(parts[0]), parts[1:]))

    def wake(self) -> None:
        """Make a waiting :meth:`receive` return. Safe from any thread and signal handler, also after :meth:`close`."""
        self._wake.ring()

    def close(self) -> None:
        """Close all sockets. Returns at once; unsent messages are dropped."""
        if not self._wake.close():
            return
        self._commands.close(0)
        self._events.close(0)
        self._auth.stop()
        self._context.term()


class WorkerWire:
    """A worker's end.

    Args:
        rank: The worker's rank.
        endpoint: The address of its controller.
    """

    def __init__(self, rank: int, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        with contextlib.ExitStack() as undo:
            self._context = zmq.Context()
            undo.callback(self._context.destroy, 0)
            self._main = self._client(zmq.DEALER, endpoint.commands, _identity(rank, "main"))
            self._control = self._client(zmq.DEALER, endpoint.commands, _identity(rank, "control"))
            self._events = self._client(zmq.PUSH, endpoint.events, queued=QUEUED_EVENTS)
            undo.pop_all()
        self._events_lock = threading.Lock()

    def _client(self, kind: int, address: str, identity: bytes | None = None, queued: int = QUEUED_MESSAGES) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.curve_serverkey = self._endpoint.server_public
        socket.curve_publickey, socket.curve_secretkey = self._endpoint.client_public, self._endpoint.client_secret
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.linger = 1000
        socket.set_hwm(queued)
        socket.connect(address)
        return socket

    def receive_main(self) -> tuple[ToMain, list[bytes]]:
        """Wait, without limit, for the next work. Only the main thread calls this."""
        parts = self._main.recv_multipart()
        return pickle.loads(parts[0]), parts[1:]

    def receive_control(self) -> ToControl:
        """Wait, without limit, for the next control message. Only the control thread calls this."""
        message: ToControl = pickle.loads(self._control.recv_multipart()[0])
        return message

    def announce(self, channel: Channel, message: FromWorker) -> None:
        """Send on the named channel's own socket; only its thread calls this.

        Ready is sent this way: when the controller has received it, the route back to that socket exists.
        """
        socket = self._main if channel == "main" else self._control
        socket.send(pickle.dumps(message, protocol=5))

    def send_event(self, message: FromWorker, frames: Sequence[Any] = ()) -> None:
        """Send output or a result, in order, from any thread. Blocks while the controller does not read."""
        parts = [pickle.dumps(message, protocol=5), *frames]
        with self._events_lock:
            self._events.send_multipart(parts, copy=not frames)

    def close(self) -> None:
        """Send queued messages for at most a second, and close. Blocks until the control thread has closed its socket."""
        self._main.close()
        self._events.close()
        # The control thread waits in its socket, which no other thread may close. term() ends that wait and blocks until the
        # socket is closed.
        self._context.term()

    def close_control(self) -> None:
        """Close the control thread's socket. Only that thread calls this, after :meth:`receive_control` has raised."""
        self._control.close(0)


def _identity(rank: int, channel: Channel) -> bytes:
    return f"{channel}-{rank}".encode()
