"""The private parts of torch that labkit repairs after an interrupt are as expected in this torch."""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from labkit.worker.groups import backends
from labkit.worker.mend import self_test
from labkit.worker.steps import cut


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
    yield
    assert not dist.is_initialized()


def test_groups_take_new_backends_and_broken_ones_refuse() -> None:
    self_test.groups()


def test_p20_broken_group_is_not_found_again_by_its_tag() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    make = functools.partial(dist.distributed_c10d._new_group_with_tag, [0], pg_tag="mine")
    first = make()
    assert make() is first
    backends.break_group(first, "broken on purpose")
    second = make()
    assert second is not first
    dist.barrier(group=second)
    dist.destroy_process_group(first)
    assert make() is second
    dist.destroy_process_group()


def test_a_group_is_not_broken_because_an_earlier_one_of_its_name_was() -> None:
    self_test.groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(8):
        dist.barrier(group=dist.new_group([0]))
    assert len(backends.groups()) == 9
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_fsdp2_fsdp1_and_ddp_come_back_from_the_middle_of_an_iteration() -> None:
    self_test.models()


def test_a_thread_that_waits_in_a_file_store_is_freed_when_the_store_is_cut(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    store = dist.FileStore(path, 2)
    store.set_timeout(timedelta(hours=1))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("never set")
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    cut.cut_store(path)
    thread.join(30)
    assert not thread.is_alive()
    assert backends.is_cut_off(raised[0])
    cut.cut_store(path)  # again, as every rank does


def test_only_connections_between_ranks_are_cut() -> None:
    before = cut.peer_sockets()
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as client, server.accept()[0] as served:
        found = {fd for fd, _ in cut.peer_sockets() - before}
        assert found == {client.fileno(), served.fileno()}
        cut.cut_gloo(known=before)  # these two belong to Python, so they are not a group's
        client.sendall(b"alive")
        assert served.recv(5) == b"alive"
