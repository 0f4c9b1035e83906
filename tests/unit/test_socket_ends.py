"""The owner of the other end of a connection: the kernel's answer and its tables agree."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from labkit.worker.groups import socket_ends

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


@pytest.mark.parametrize(
    ("family", "host", "target"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "127.0.0.1", "::ffff:127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
    ],
)
def test_s14_the_other_end_is_found_with_its_user(family: socket.AddressFamily, host: str, target: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listener, socket.socket(family) as client:
        client.connect((target, listener.getsockname()[1]))
        assert socket_ends.find(listener.getsockname(), ("127.0.0.1", 1)) is None
        server, _ = listener.accept()
        with server:
            own, peer = server.getsockname(), server.getpeername()
            expected = (1, os.geteuid(), os.fstat(client.fileno()).st_ino)
            assert socket_ends.find(peer, own) == expected
            # Without socket diagnosis the kernel gives no answer, but never a wrong one.
            assert socket_ends.ask(server.family, peer, own) in (expected, None)
            client.close()
            for end in (socket_ends.find(peer, own), socket_ends.ask(server.family, peer, own)):
                assert end is None or end.inode == 0


def test_s14_the_listener_on_a_port_is_not_taken_for_an_end_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert socket_ends.ask(socket.AF_INET, listener.getsockname(), ("127.0.0.1", 1)) is None
