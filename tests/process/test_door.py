"""Strangers at the port for machines: they use few descriptors and little memory, and keep nobody out for long."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import psutil
import pytest

from labkit.wire import door
from labkit.wire.hub import Hub, HubLink
from labkit.wire.node_messages import AreYouThere
from labkit.wire.transport import Keys
from tests.process.patience import until

ME = psutil.Process()
STRANGERS = 2 * door.YOUNG
# ZMTP 3.1, mechanism CURVE: the first 64 bytes of a client.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.fixture
def keys() -> Keys:
    return Keys.generate()


@pytest.fixture
def hub(keys: Keys) -> Iterator[Hub]:
    hub = Hub("tcp://127.0.0.1:*", keys)
    yield hub
    hub.close()


@contextlib.contextmanager
def link_to(hub: Hub, keys: Keys, name: str) -> Iterator[HubLink]:
    link = HubLink(f"tcp://127.0.0.1:{hub.port}", keys, name)
    try:
        until(link.look, f"{name} is connected", 20)
        yield link
    finally:
        link.close()


def is_heard(hub: Hub, link: HubLink, name: str) -> bool:
    # The machine may know that it is connected before the hub does.
    until(lambda: hub.send(name, AreYouThere()), f"{name} can be sent to", 20)
    # A socket may be readable before the whole message has come.
    until(lambda: link.receive() is not None, f"{name} hears the hub", 20)
    return True


@contextlib.contextmanager
def strangers(port: int, says: bytes) -> Iterator[list[socket.socket]]:
    found = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(STRANGERS)]
    try:
        for one in found:
            with contextlib.suppress(OSError):
                one.sendall(says)
        yield found
    finally:
        for one in found:
            one.close()


@pytest.mark.parametrize("says", [b"", b"\xff", GREETING], ids=["nothing", "a byte", "a greeting"])
def test_s6_connections_without_a_key_take_few_descriptors_are_closed_and_disturb_no_machine(
    hub: Hub, keys: Keys, says: bytes
) -> None:
    with link_to(hub, keys, "machine 0") as early:
        before = ME.num_fds()
        with strangers(hub.port, says):
            most = before + STRANGERS + door.YOUNG + 10
            until(lambda: ME.num_fds() <= most, "no more than the first are kept", 2)
            assert is_heard(hub, early, "machine 0")
            with link_to(hub, keys, "machine 1") as late:  # while the strangers are there
                assert is_heard(hub, late, "machine 1")
            until(lambda: ME.num_fds() <= before + STRANGERS + 10, "those are closed too", 4 * door.HANDSHAKE_MS / 1000)
            assert is_heard(hub, early, "machine 0")


def test_s6_frame_that_is_too_large_ends_its_connection_before_it_is_in_memory(hub: Hub) -> None:
    before = ME.memory_info().rss
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as stranger:
        stranger.sendall(GREETING)
        assert stranger.recv(64)
        stranger.sendall(struct.pack(">BQ", 0x06, 600 << 20))  # a long command
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            stranger.sendall(bytes(64 << 20))
    assert ME.memory_info().rss - before < 16 << 20


def test_s6_parts_of_any_size_still_travel(hub: Hub, keys: Keys) -> None:
    with link_to(hub, keys, "machine 0") as link:
        part = bytes(range(256)) * (door.PIECE_BYTES * 3 // 256) + b"end"
        assert hub.send("machine 0", AreYouThere(), part)
        assert link.socket.poll(20_000)
        received = link.receive()
        assert received is not None
        assert received[1] == [part]
