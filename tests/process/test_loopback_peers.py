"""Another user of the machine cannot be a peer of gloo or use up its descriptors; listeners of the reader's code stay open."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from labkit import RunTimeoutError, WorkerPool
from tests.process import neighbour
from tests.process.ports import listening

IN_USER_NAMESPACE = """
import os, socket, sys
from labkit.errors import StrangerError
from labkit.worker.groups import loopback_peers, socket_ends
listener = socket.create_server(("127.0.0.1", 0))
loop = loopback_peers._Loop(-1, listener.fileno(), os.fstat(listener.fileno()).st_ino)
def settled():
    connection, _ = listener.accept()
    try:
        return loopback_peers._is_settled(connection.fileno(), os.fstat(connection.fileno()).st_ino, loop, True, True)
    except StrangerError as error:
        return f"stranger {error.uid}"
own = socket.create_connection(listener.getsockname())
print(listener.getsockname()[1], os.geteuid(), settled(), flush=True)
found = settled()
end = socket_ends.find(own.getsockname(), own.getpeername())
print(found, end.uid, socket_ends.is_ours(end), flush=True)
"""
STRANGER = """
import os, socket, sys
peer = socket.socket()
os.setuid(65534)
peer.connect(("127.0.0.1", int(sys.argv[1])))
peer.recv(1)
"""
ROOT = Path(__file__).parents[2]
COUNT = 1500
SUM = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"


def _may_play_a_neighbour() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


def _may_make_a_namespace(kinds: Sequence[str] = ("--net",)) -> bool:
    if not _may_play_a_neighbour() or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", *kinds, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere gloo stays as torch makes it")
with_neighbour = pytest.mark.skipif(not _may_play_a_neighbour(), reason="only root can play another user")
with_namespace = pytest.mark.skipif(
    not _may_make_a_namespace(), reason="only root can play another user, in a network namespace (unshare --net)"
)


def scenario(name: str) -> dict[str, Any]:
    command = ["unshare", "--net", sys.executable, "-m", "tests.process.loopback_scenarios", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_refused(found: dict[str, Any], told: str, ranks: int) -> None:
    """Require that the neighbour connected, was named and got nothing, and that everything not refused works."""
    assert found["came"] >= 1
    assert "the user nobody (uid 65534) connected to port " in told
    assert "nothing was sent over it, and the group was not made" in told
    assert found["received"] == 0
    assert set(found["sums"]) <= {float(ranks)}
    assert found["after"] == float(ranks)


@with_namespace
def test_s14_a_start_in_which_another_user_takes_a_rank_s_place_is_refused_and_sends_him_nothing() -> None:
    found = scenario("start")
    assert_refused(found, found["told"], 3)
    assert "Traceback" not in found["told"]


@with_namespace
def test_s14_a_new_group_in_which_another_user_takes_a_rank_s_place_is_refused_and_variables_are_kept() -> None:
    found = scenario("new_group")
    assert_refused(found, found["told"], 4)
    assert found["kinds"] == ["labkit.errors.StrangerError"]
    assert found["kept"] == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def used_pool() -> Iterator[WorkerPool]:
    """A pool with every kind of listener: of the default group, of a later one, of a mesh, and of what was rebuilt after a stop.

    Its ranks may have as many descriptors as is usual.
    """
    with WorkerPool(4, device="cpu", replace=True) as pool:
        pool.run_cell(f"{SUM}\nimport resource, time\nfrom torch.distributed.device_mesh import init_device_mesh")
        pool.run_cell("resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))")
        pool.run_cell("group = dist.new_group([0, 1, 2, 3])\nmesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b'))")
        with pytest.raises(RunTimeoutError):
            pool.run_cell("dist.barrier() if rank else time.sleep(60)", timeout_s=1.0)
        yield pool


@contextlib.contextmanager
def flood(ports: list[int]) -> Iterator[dict[str, int]]:
    """The neighbour holds connections to each port."""
    command = [sys.executable, neighbour.__file__, "flood", str(COUNT), *map(str, ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.communicate("", timeout=30)


def descriptors(pool: WorkerPool) -> dict[int, int]:
    return {rank: len(os.listdir(f"/proc/{pid}/fd")) for rank, pid in pool.pids.items()}


@with_neighbour
def test_s14_idle_connections_of_another_user_take_no_descriptor_and_end_no_rank(used_pool: WorkerPool) -> None:
    pool = used_pool
    ports = {rank: [port for _, port in listening([pid])] for rank, pid in pool.pids.items()}
    assert min(map(len, ports.values())) >= 3
    before, pids = descriptors(pool), pool.pids
    with flood([*ports[0], ports[3][0]]) as found:
        assert found["standing"] == 0
        assert descriptors(pool) == before
        every = (
            f"{SUM}\nfor name in 'ab':\n    dist.all_reduce(ones, group=mesh.get_group(name))\ndist.all_reduce(ones, group=group)"
        )
        assert pool.run_cell(f"{every}\nfloat(ones)", want_value=True, timeout_s=30).same() == 64.0  # type: ignore[union-attr]
        # Rebuild once more, and make a later group: their ports are open for a moment and then closed again.
        with pytest.raises(RunTimeoutError):
            pool.run_cell("dist.barrier() if rank else time.sleep(60)", timeout_s=1.0)
        pool.run_cell("group = dist.new_group([0, 1, 2, 3])")
        assert pool.run_cell(f"{every}\nfloat(ones)", want_value=True, timeout_s=30).same() == 64.0  # type: ignore[union-attr]
    assert pool.pids == pids
    assert pool.dead_ranks == ()


USERS_LISTENERS = """
import asyncio, socket, threading
opened, stop = [], threading.Event()
def listen(address="127.0.0.1"):
    item = socket.create_server((address, 0))
    opened.append(item.getsockname()[1])
    return item
kept = [listen()]
def keep_listening():
    while not stop.wait(0.0005) and len(opened) < 150:
        kept.append(listen())
async def serve():
    servers = []
    while not stop.is_set() and len(opened) < 150:
        servers.append(await asyncio.start_server(lambda *_: None, "127.0.0.1", 0))
        opened.append(servers[-1].sockets[0].getsockname()[1])
        await asyncio.sleep(0.0005)
    await asyncio.Event().wait()
threads = [threading.Thread(target=work, daemon=True) for work in (keep_listening, lambda: asyncio.run(serve()))]
for thread in threads:
    thread.start()
groups = [dist.new_group([0, 1]) for _ in range(10)]
stop.set()
threads[0].join()
opened
"""


def test_s14_listeners_that_a_cell_opens_while_groups_are_made_stay_reachable(pool: WorkerPool) -> None:
    pool.run_cell("import time\n" + SUM)
    opened = pool.run_cell(USERS_LISTENERS, want_value=True, timeout_s=60)
    with pytest.raises(RunTimeoutError):  # a rebuilding leaves them alone too
        pool.run_cell("dist.barrier() if rank else time.sleep(60)", timeout_s=1.0)
    assert opened is not None
    for rank in (0, 1):
        assert len(opened[rank]) > 5
        for port in opened[rank]:
            socket.create_connection(("127.0.0.1", port), 5.0).close()
        gloo = {port for _, port in listening([pool.pids[rank]])} - set(opened[rank])
        assert len(gloo) >= 11
        for port in gloo:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.05)
    pool.restart()


@pytest.mark.skipif(not _may_make_a_namespace(["--user"]), reason="only root can play another user, in a user namespace")
def test_s14_another_user_whom_a_user_namespace_does_not_tell_from_this_one_is_a_stranger() -> None:
    """In a namespace without a user mapping everybody is 65534, including the process that asks."""
    inside = ["unshare", "--user", sys.executable, "-c", IN_USER_NAMESPACE]
    with subprocess.Popen(inside, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port, uid, own = process.stdout.readline().split()
            assert (uid, own) == ("65534", "True")
            subprocess.run([sys.executable, "-c", STRANGER, port], check=True, timeout=30)
            assert process.stdout.readline().split() == ["stranger", "65534", "65534", "True"]
        finally:
            process.kill()


def test_s14_without_the_kernel_s_answers_its_tables_are_read(pool: WorkerPool) -> None:
    """The kernel may have no socket diagnosis."""
    pool.run_cell(f"{SUM}\nfrom labkit.worker.groups import socket_ends\nask, socket_ends.ask = socket_ends.ask, lambda *_: None")
    made = "group = dist.new_group([0, 1])\ndist.all_reduce(ones, group=group)\nfloat(ones)"
    assert pool.run_cell(made, want_value=True, timeout_s=60).same() == 4.0  # type: ignore[union-attr]
    pool.run_cell("socket_ends.ask = ask")
