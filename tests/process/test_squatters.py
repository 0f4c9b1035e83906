"""A neighbour who holds the notebook's port while no notebook is there: agents wait on, take little, and come back."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from labkit.wire.hub import Hub, HubLink
from labkit.wire.transport import Keys
from tests.process.patience import until

ME = psutil.Process()


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + b"\x01" + bytes(31)


REFUSAL = b"\x05ERROR\x03400"


def refuses(peer: socket.socket) -> None:
    peer.sendall(greeting(b"CURVE"))
    read(peer, 64 + 200)
    peer.sendall(bytes([4, len(REFUSAL)]) + REFUSAL)
    read(peer, 1)


def knows_no_keys(peer: socket.socket) -> None:
    peer.sendall(greeting(b"NULL"))
    read(peer, 64)
    time.sleep(0.1)


def speaks_something_else(peer: socket.socket) -> None:
    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
    time.sleep(0.1)


def speaks_of_old(peer: socket.socket) -> None:
    peer.sendall(b"\x01\x00" * 40)
    time.sleep(0.1)


def sends_a_long_command(peer: socket.socket) -> None:
    peer.sendall(greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 12 << 30))
    with contextlib.suppress(OSError):
        for _ in range(400):
            peer.sendall(bytes(1 << 20))


def hangs_up(peer: socket.socket) -> None:
    time.sleep(0.05)


def read(peer: socket.socket, size: int) -> None:
    while size > 0 and (piece := peer.recv(4096)):
        size -= len(piece)


SQUATTERS = [refuses, knows_no_keys, speaks_something_else, speaks_of_old, sends_a_long_command, hangs_up]


class Squatter:
    """Somebody who listens at a port and answers whoever connects."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.answer, self.answered = answer, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(3)
                with contextlib.suppress(OSError):
                    self.answer(peer)
            self.answered += 1

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@contextlib.contextmanager
def squatting(answer: Callable[[socket.socket], None]) -> Iterator[Squatter]:
    squatter = Squatter(answer)
    try:
        yield squatter
    finally:
        squatter.leave()


@pytest.mark.parametrize("answer", SQUATTERS, ids=lambda answer: answer.__name__)
def test_v3_an_agent_comes_back_whatever_has_answered_in_the_notebooks_place(answer: Callable[[socket.socket], None]) -> None:
    keys, before = Keys.generate(), ME.memory_info().rss
    most = before
    with squatting(answer) as squatter, contextlib.closing(HubLink(f"tcp://127.0.0.1:{squatter.port}", keys, "machine 0")) as link:

        def has_come_twice() -> bool:
            nonlocal most
            most = max(most, ME.memory_info().rss)
            return link.look() or squatter.answered >= 2

        until(has_come_twice, "it has come twice", 30)
        assert not link.connected
        assert most - before < 32 << 20
        squatter.leave()
        with contextlib.closing(Hub(f"tcp://127.0.0.1:{squatter.port}", keys)):
            until(link.look, "it is back", 20)
            assert not link.refused
