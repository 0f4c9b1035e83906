"""Peers without the pool's key are ignored: messages are pickles, and a stranger's pickle could run code.

The data sent to each socket would create a file if it were unpickled. The file never exists, and the pool answers as before.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
import zmq.utils.monitor

from labkit import WorkerPool
from labkit.controller.start.launchers import fork_server
from labkit.wire.hub import Hub, HubLink
from labkit.wire.node_messages import NodeFailed
from labkit.wire.transport import Endpoint, Keys
from tests.process import stranger
from tests.process.patience import LOAD, until
from tests.process.ports import listening

SUM = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"
LOOPBACK = ("127.0.0.1", "::1")


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.fixture
def crater(tmp_path: Path) -> Path:
    """The file that exists if a bomb has gone off."""
    path = tmp_path / "crater"
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.exists(), "the bomb is a dud"
    path.unlink()
    return path


@pytest.fixture
def unharmed(pool: WorkerPool, crater: Path) -> Iterator[bytes]:
    """A pickled bomb to throw. Afterwards it has not gone off, and the same ranks answer and work together."""
    before = pool.pids
    yield pickle.dumps(Bomb(crater))
    for _ in range(3):
        results = pool.run_cell(SUM, want_value=True, timeout_s=30)
        assert results is not None
        assert results.same() == 2.0
    assert pool.pids == before
    assert pool.dead_ranks == ()
    assert not crater.exists()


# ---- doors -----------------------------------------------------------------------------------------------------------


def listeners(pid: int, kind: str = "inet") -> list[Any]:
    """A process's sockets that wait for connections, or, as UDP does, for anything."""
    found = psutil.Process(pid).net_connections(kind)
    return [item for item in found if item.status == psutil.CONN_LISTEN or (item.type == socket.SOCK_DGRAM and not item.raddr)]


def test_case_23_labkit_opens_no_port_and_gloo_listens_on_loopback_only(pool: WorkerPool) -> None:
    before = listeners(os.getpid())
    pool.restart()
    pool.run(lambda: 1)
    assert listeners(os.getpid()) == before
    if fork_server.available():
        assert listeners(fork_server.shared().pid) == []
    for pid in pool.pids.values():
        # These are gloo's, and exist with the process group. labkit itself opens none, in a pool of one rank either.
        assert {item.laddr.ip for item in listeners(pid)} <= set(LOOPBACK)
    code = "import torch.distributed as dist, psutil, os\ndist.destroy_process_group()\nimport gc\n_ = gc.collect()"
    with_gloo = {rank: len(listeners(pid)) for rank, pid in pool.pids.items()}
    pool.run_cell(code)
    without = {rank: len(listeners(pid)) for rank, pid in pool.pids.items()}
    pool.restart()
    assert set(with_gloo.values()) == {1}
    assert set(without.values()) <= {0, 1}


def test_unix_sockets_lie_in_a_private_folder(pool: WorkerPool) -> None:
    folder = Path(pool._life.runner.members._world._directory)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()
    assert {path.name for path in folder.iterdir() if path.is_socket()} == {"commands", "events"}
    for pid in (os.getpid(), *pool.pids.values()):
        named = [item.laddr for item in psutil.Process(pid).net_connections("unix") if item.laddr]
        of_labkit = [name for name in named if "labkit" in name]
        assert not [name for name in named if name.startswith(("@", "\0"))]
        assert all(Path(name).parent == folder for name in of_labkit)


def test_key_stands_in_no_command_line_and_no_environment(pool: WorkerPool) -> None:
    endpoint = pool._life.runner.members._world.wire.endpoint
    secrets = [endpoint.client_secret.decode(), endpoint.client_public.decode()]
    seen = [str(pool.pull("dict(__import__('os').environ)"))]
    for pid in (os.getpid(), fork_server.shared().pid, *pool.pids.values()):
        seen += [" ".join(psutil.Process(pid).cmdline()), str(psutil.Process(pid).environ())]
    assert not any(secret in text for secret in secrets for text in seen)


# ---- raw bytes -------------------------------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f"


def zmtp3(mechanism: bytes, *frames: bytes) -> bytes:
    """A ZeroMQ peer of today: greeting, READY, and a message."""
    greeting = GREETING + b"\x03\x00" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + struct.pack(">I", 0)
    message = b"".join(bytes([2 | (number < len(frames) - 1)]) + struct.pack(">Q", len(f)) + f for number, f in enumerate(frames))
    return greeting + b"\x04" + bytes([len(ready)]) + ready + message


def zmtp2(*frames: bytes) -> bytes:
    """A ZeroMQ 3 peer, from before there were keys: signature, revision, socket type, identity, and a message."""
    message = b"".join(bytes([2 | (number < len(frames) - 1)]) + struct.pack(">Q", len(f)) + f for number, f in enumerate(frames))
    return GREETING + b"\x01\x05" + b"\x00\x00" + message


def zmtp1(*frames: bytes) -> bytes:
    """A ZeroMQ 2 peer: an empty identity, and a message."""
    message = b"".join(
        b"\xff" + struct.pack(">Q", len(f) + 1) + bytes([number < len(frames) - 1]) + f for number, f in enumerate(frames)
    )
    return b"\x01\x00" + message


RAW: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda bomb: b"",
    "one byte": lambda bomb: b"\x00",
    "random bytes": lambda bomb: random.Random(0).randbytes(100_000),
    "zeros": lambda bomb: bytes(1_000_000),
    "ones": lambda bomb: b"\xff" * 1_000_000,
    "a bare pickle": lambda bomb: bomb,
    "an HTTP request": lambda bomb: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a signature": lambda bomb: GREETING[:5],
    "half a greeting": lambda bomb: zmtp3(b"CURVE")[:30],
    "a greeting of CURVE and a message": lambda bomb: zmtp3(b"CURVE", b"main-0", bomb),
    "a peer without security": lambda bomb: zmtp3(b"NULL", bomb),
    "a peer without security that claims to be a rank": lambda bomb: zmtp3(b"NULL", b"main-0", bomb),
    "a password peer": lambda bomb: zmtp3(b"PLAIN", bomb),
    "an unknown mechanism": lambda bomb: zmtp3(b"MAGIC", bomb),
    "a peer of ZeroMQ 3": zmtp2,
    "a peer of ZeroMQ 2": zmtp1,
    "an endless frame": lambda bomb: zmtp3(b"CURVE") + b"\x06" + struct.pack(">Q", 2**63 - 1) + bytes(10_000),
}


def throw(family: int, address: Any, data: bytes) -> None:
    """Send bytes, and wait for the other end to hang up."""
    with socket.socket(family, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(2.0 * LOAD)
        stranger.connect(address)
        with contextlib.suppress(ConnectionError):  # it hangs up before it has read everything
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(65536):
                pass


@pytest.mark.parametrize("name", RAW)
def test_case_23_raw_bytes_at_the_unix_sockets_are_refused(pool: WorkerPool, unharmed: bytes, name: str) -> None:
    for door in ("commands", "events"):
        throw(socket.AF_UNIX, str(Path(pool._life.runner.members._world._directory) / door), RAW[name](unharmed))


@pytest.mark.skipif(sys.platform != "linux", reason="labkit closes gloo's ports on Linux only")
def test_case_23_nobody_comes_in_at_gloos_sockets_once_the_ranks_are_connected(pool: WorkerPool) -> None:
    doors = [item.laddr for pid in pool.pids.values() for item in listeners(pid)]
    assert doors
    for address in doors:
        with pytest.raises(TimeoutError):
            socket.create_connection(tuple(address), timeout=0.5)


def test_strangers_who_connect_and_say_nothing_keep_nobody_out(pool: WorkerPool, unharmed: bytes) -> None:
    path = Path(pool._life.runner.members._world._directory)
    strangers = []
    for door in ("commands", "events"):
        for _ in range(50):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(str(path / door))
            strangers.append(stranger)
    assert pool.run(lambda: 1).same() == 1
    for stranger in strangers:
        stranger.close()


# ---- ZeroMQ peers ----------------------------------------------------------------------------------------------------


class Stranger:
    """A ZeroMQ socket, and how its handshake ended."""

    FAILED = zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL

    def __init__(self, context: zmq.Context[Any], kind: int, **options: Any) -> None:
        self.socket = context.socket(kind)
        self.socket.linger = 0
        for name, value in options.items():
            setattr(self.socket, name, value)
        self._monitor = self.socket.get_monitor_socket()

    def send(self, address: str, *frames: bytes) -> None:
        self.socket.connect(address)
        self.socket.send_multipart(frames, flags=zmq.NOBLOCK)

    def outcome(self) -> str:
        """``refused`` or ``let in``; a peer that hangs up during the handshake has refused too."""
        while self._monitor.poll(int(2000 * LOAD)):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
            if event & self.FAILED or event == zmq.Event.DISCONNECTED:
                return "refused"
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return "let in"
        return "no answer"

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.term()


def options_of(who: str, endpoint: Endpoint | Keys) -> dict[str, Any]:
    public, secret = zmq.curve_keypair()
    return {
        "no security": {},
        "a password": {"plain_username": b"labkit", "plain_password": b"labkit"},
        "a key of its own": {"curve_serverkey": endpoint.server_public, "curve_publickey": public, "curve_secretkey": secret},
        "the pool's public key only": {
            "curve_serverkey": endpoint.server_public,
            "curve_publickey": endpoint.client_public,
            "curve_secretkey": secret,
        },
        "another server's key": {
            "curve_serverkey": public,
            "curve_publickey": endpoint.client_public,
            "curve_secretkey": endpoint.client_secret,
        },
    }[who]


STRANGERS = ["no security", "a password", "a key of its own", "the pool's public key only", "another server's key"]


@pytest.mark.parametrize("who", STRANGERS)
def test_case_23_peer_without_the_key_is_refused(pool: WorkerPool, unharmed: bytes, context: zmq.Context[Any], who: str) -> None:
    endpoint = pool._life.runner.members._world.wire.endpoint
    for kind, address in ((zmq.DEALER, endpoint.commands), (zmq.PUSH, endpoint.events)):
        stranger = Stranger(context, kind, **options_of(who, endpoint))
        stranger.send(address, unharmed)
        assert stranger.outcome() == "refused"
        stranger.close()


@pytest.mark.parametrize("who", STRANGERS)
def test_case_23_a_port_for_other_machines_refuses_a_peer_without_the_key(
    crater: Path, context: zmq.Context[Any], who: str
) -> None:
    keys = Keys.generate()
    hub = Hub("tcp://127.0.0.1:*", keys)
    try:
        stranger = Stranger(context, zmq.DEALER, **options_of(who, keys))
        stranger.send(f"tcp://127.0.0.1:{hub.port}", pickle.dumps(Bomb(crater)))
        assert stranger.outcome() == "refused"
        stranger.close()
        friend = HubLink(f"tcp://127.0.0.1:{hub.port}", keys, "a friend")
        friend.send([pickle.dumps(NodeFailed("hello"))])
        heard: list[Any] = []
        until(lambda: heard.extend(hub.receive(0.1)) or heard, "the machine with the key is heard")
        assert heard == [("a friend", NodeFailed("hello"), [])]
        assert not crater.exists()
        friend.close()
    finally:
        hub.close()


def test_what_travels_between_machines_cannot_be_read_on_the_way() -> None:
    """A relay between the two sees neither the text nor the pickle around it."""
    keys = Keys.generate()
    hub = Hub("tcp://127.0.0.1:*", keys)
    relay = socket.create_server(("127.0.0.1", 0))
    friend = HubLink(f"tcp://127.0.0.1:{relay.getsockname()[1]}", keys, "a friend")
    inner, _ = relay.accept()
    outer = socket.create_connection(("127.0.0.1", hub.port))
    seen: list[bytes] = []
    heard: list[Any] = []

    def pass_on() -> bool:
        for source, target in ((inner, outer), (outer, inner)):
            source.setblocking(False)
            try:
                data = source.recv(65536)
            except BlockingIOError:
                continue
            seen.append(data)
            target.setblocking(True)
            target.sendall(data)
        heard.extend(hub.receive(0.01))
        return bool(heard)

    friend.send([pickle.dumps(NodeFailed("the secret text"))])
    try:
        until(pass_on, "the message has arrived through the relay")
        traffic = b"".join(seen)
        assert b"CURVE" in traffic  # the greeting is in the clear
        assert b"secret" not in traffic
        assert b"labkit.wire.node_messages" not in traffic
        assert b"labkit.wire.node_messages" in pickle.dumps(heard[0][1])
    finally:
        for item in (inner, outer, relay):
            item.close()
        friend.close()
        hub.close()


# Last in this file: its pool takes the place of the one that the other tests share.
def test_s1_machines_played_on_one_listen_on_loopback_only_and_a_stranger_there_runs_no_code(crater: Path) -> None:
    """Another user of the machine attacks every port. Attacks on torch's store are in tests/multihost/test_trust_ports.py."""
    crater.parent.chmod(0o777)
    before = listening([os.getpid()])
    with WorkerPool(4, "cpu", launcher="agents", num_nodes=2, replace=True) as pool:
        pool.run_cell(f"{SUM}\nkept = rank")
        pids = [os.getpid(), *(item.pid for item in psutil.Process().children(recursive=True))]
        doors = listening(pids).keys() - before.keys()
        assert len(doors) >= 6  # the notebook's, the store's, and gloo's on each rank
        assert {address for address, _ in doors} == {"127.0.0.1"}
        command = [sys.executable, stranger.__file__, str(crater), *(f"{address}:{port}" for address, port in doors)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert not any(item.get("let in") for item in found.values())
        assert sum("read" in item for item in found.values()) == 1
        assert pool.run_cell(SUM, want_value=True, timeout_s=30).same() == 4.0  # type: ignore[union-attr]
        pool.restart([3])
        assert pool.run_cell(SUM, want_value=True, timeout_s=30).same() == 4.0  # type: ignore[union-attr]
        assert pool.pull("kept", ranks="0-2") == {0: 0, 1: 1, 2: 2}
    assert not crater.exists()
