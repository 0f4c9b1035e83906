"""A pool whose ranks live on two hosts: cells, output, hangs, deaths, values, and a host that is cut off and comes back."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import PoolStateError, RunTimeoutError, WorkerDiedError, WorkerPool
from labkit.controller.machines import attach
from labkit.controller.machines.launch_text import Launch
from labkit.errors import InvalidPoolError, WorkerStartError
from labkit.wire import key_file
from labkit.wire.key_file import KeyFile, write_private
from labkit.wire.transport import Keys
from tests.matrix import matrix
from tests.multihost.hosts import NETWORK, Host
from tests.process.patience import LOAD, until

SUM = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"


@pytest.fixture(scope="module")
def pool(hosts: list[Host], called: list[Launch], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    key_file = tmp_path_factory.mktemp("key") / "labkit.key"
    with WorkerPool.attach(
        2, 2, "cpu", host=f"{NETWORK}.1", key_file=key_file, linger_s=60, start_timeout_s=180, replace=True
    ) as pool:
        yield pool


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the four ranks work together."""
    yield
    if "pool" in request.fixturenames:
        pool: WorkerPool = request.getfixturevalue("pool")
        assert pool.run_cell(SUM, want_value=True, timeout_s=60).same() == 4.0  # type: ignore[union-attr]


def test_ranks_live_on_both_hosts_and_work_together(pool: WorkerPool) -> None:
    where = pool.run_cell("import os\n(os.environ['LABKIT_HOST'], local_rank, os.environ['LOCAL_WORLD_SIZE'])", want_value=True)
    assert where is not None
    assert len({where[rank][0] for rank in (0, 1)}) == 1
    assert {where[0][0], where[2][0]} == {"0", "1"}
    assert [where[rank][1:] for rank in range(4)] == [(0, "2"), (1, "2"), (0, "2"), (1, "2")]
    assert repr(pool) == "WorkerPool(world_size=4, device='cpu'): 4 ranks on 2 machines, CPU processes, gloo"


def test_output_says_which_machine_it_comes_from(pool: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run_cell("print('hello')")
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[rank {rank}, node {rank // 2}] hello" for rank in range(4)]


def test_a_hang_between_hosts_is_explained_and_freed_and_every_rank_keeps_its_variables(pool: WorkerPool) -> None:
    pool.run_cell(f"{SUM}\nkept = rank")
    with pytest.raises(RunTimeoutError) as caught:
        pool.run_cell("if rank != 3:\n    dist.barrier()", timeout_s=1)
    assert "rank 3 finished the cell; ranks 0-2 wait in barrier" in caught.value.diagnosis
    assert pool.pull("kept") == {rank: rank for rank in range(4)}


def test_a_sharded_model_trains_on_after_an_interrupt_between_hosts(pool: WorkerPool) -> None:
    pool.run_cell(
        "from torch.distributed.fsdp import fully_shard\ntorch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
        "for layer in model:\n    _ = fully_shard(layer)\n_ = fully_shard(model)\n"
        "adam = torch.optim.Adam(model.parameters(), lr=0.01)\n"
        "def step():\n    loss = model(torch.full((2, 8), float(rank))).square().sum()\n    loss.backward()\n    adam.step()\n"
        "    adam.zero_grad()\n    return float(loss.detach())\n_ = step()"
    )
    with pytest.raises(RunTimeoutError):
        pool.run_cell("if rank < 3:\n    step()", timeout_s=1)
    after = pool.run_cell("[step() for _ in range(3)]", want_value=True)
    pool.run_cell(
        "torch.manual_seed(0)\nmodel = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
        "for layer in model:\n    _ = fully_shard(layer)\n_ = fully_shard(model)\n"
        "adam = torch.optim.Adam(model.parameters(), lr=0.01)\n_ = step()"
    )
    assert pool.run_cell("[step() for _ in range(3)]", want_value=True) == after


def test_a_rank_that_dies_on_another_host_is_replaced_there_and_the_others_keep_their_variables(pool: WorkerPool) -> None:
    pool.run_cell("kept = rank")
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell(
            "import os, signal\nprint('last words')\nif rank == 3:\n    os.kill(os.getpid(), signal.SIGSEGV)\ndist.barrier()"
        )
    (death,) = (failure for failure in caught.value.failures if failure.kind == "died")
    assert (death.rank, death.type_name, death.last_output) == (3, "SIGSEGV", "last words")
    pool.restart([3])
    assert pool.pull("kept", ranks="0-2") == {rank: rank for rank in range(3)}


def test_pushed_tensors_cross_the_link_once_for_each_host(pool: WorkerPool, hosts: list[Host]) -> None:
    data = torch.arange(4 << 20)
    before = [host.received_bytes for host in hosts]
    pool.push(data=data)
    for host, count in zip(hosts, before, strict=True):
        assert data.nbytes < host.received_bytes - count < 1.2 * data.nbytes
    assert pool.run_cell("int(data.sum())", want_value=True).same() == int(data.sum())  # type: ignore[union-attr]
    assert torch.equal(pool.pull("data", ranks=[3])[3], data)


def test_a_host_that_is_cut_off_is_named_within_5_seconds_and_its_ranks_are_replaced_when_it_is_back(
    pool: WorkerPool, hosts: list[Host]
) -> None:
    pool.run_cell("import os\nimport torch.distributed as dist\nkept = rank\nhere = os.environ['LABKIT_HOST']")
    (lost,) = (host for host in hosts if str(host.number) == pool.pull("here")[2])
    cut_at: list[float] = []

    def cut_off() -> None:
        lost.cut_off()
        cut_at.append(time.monotonic())

    threading.Timer(0.5, cut_off).start()
    with pytest.raises(WorkerDiedError) as caught:
        pool.run_cell("import time\nwhile True:\n    time.sleep(0.05)\n    dist.barrier()")
    took = time.monotonic() - cut_at[0]
    assert took < 5.0 * LOAD
    assert caught.value.failed_ranks == (2, 3)
    assert "node 1 (" in str(caught.value)
    assert "is out of reach" in str(caught.value)
    with pytest.raises(PoolStateError, match=r"node 1 \(.*\) \(ranks 2-3\) is out of reach"):
        pool.restart([2, 3])
    with pytest.raises(PoolStateError, match="ranks 2-3 are dead"):
        pool.run(lambda: 1)
    lost.connect()

    def back() -> bool:
        try:
            pool.restart([2, 3])
        except PoolStateError:
            return False
        return True

    until(back, "the host is back")
    assert pool.pull("kept", ranks="0-1") == {0: 0, 1: 1}


def test_a_large_push_takes_as_long_as_it_takes(pool: WorkerPool) -> None:
    data = torch.ones(64 << 20)
    pool.push(data=data)
    assert pool.run_cell("float(data[::4096].sum())", want_value=True).same() == float(data[::4096].sum())  # type: ignore[union-attr]
    pool.run_cell("del data")


@pytest.mark.parametrize(
    ("file", "message"), [("labkit.key", "another notebook uses"), ("labkit.key.notebook", "WorkerPool.reattach")]
)
def test_the_key_file_of_another_notebook_is_not_written_over(tmp_path: Path, file: str, message: str) -> None:
    path = tmp_path / file
    other = os.getppid()
    owner = f"{other}.{key_file._start_of(other)}@{socket.gethostname()}"
    content = {"server_public": "a", "client_public": "b", "client_secret": "c", "owner": owner}
    write_private(path, content)
    with pytest.raises(InvalidPoolError, match=message):
        WorkerPool.attach(2, 1, key_file=tmp_path / "labkit.key", start_timeout_s=1.0, replace=True)
    assert [found.name for found in tmp_path.iterdir()] == [file]
    assert json.loads(path.read_text()) == content


def test_a_second_notebook_cannot_take_the_port(pool: WorkerPool, tmp_path: Path) -> None:
    port = pool._life.site.nodes.port  # type: ignore[attr-defined]
    with pytest.raises(InvalidPoolError, match=f"cannot listen on tcp://0.0.0.0:{port}: Address already in use"):
        WorkerPool.attach(1, 1, listen=f"tcp://0.0.0.0:{port}", key_file=tmp_path / "labkit.key", replace=True)
    assert not pool.closed


def test_a_machine_with_another_key_says_so_and_is_not_heard(
    pool: WorkerPool, hosts: list[Host], called: list[Launch], tmp_path: Path
) -> None:
    other = tmp_path / "labkit.key"
    KeyFile.of(Keys.generate()).write(other)
    process = hosts[0].agent(replace(called[-1], key_file=str(other)), "--wait", "3")
    assert process.wait(60) == 1
    assert f"no notebook with this key answers at {called[-1].connect} after 3 s" in hosts[0].output.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    matrix(
        (["--node-rank", "1"], r"--node-rank says that it is node 1, which process \d+ on .* is\. Start one labkit process"),
        (["--node-rank", "2"], r"--node-rank says that it is node 2, and the notebook attaches 2, counted from 0: make both equal"),
        ([], "the pool has its 2 machines already"),
    ),
)
def test_s1_a_machine_too_many_is_told_so_and_harms_nobody(
    pool: WorkerPool, hosts: list[Host], called: list[Launch], options: list[str], message: str
) -> None:
    before = pool.pids
    process = hosts[0].agent(called[-1], *options)
    until(lambda: pool.nodes and process.poll() is not None, "the agent has heard that it is one too many", 60)
    assert process.returncode == 1
    assert re.search(f"labkit: the notebook refuses this machine: {message}", hosts[0].output.read_text())
    assert pool.pids == before


@pytest.mark.parametrize(
    ("environ", "message"),
    matrix(
        ({"SLURM_NODEID": "0"}, r"SLURM_NODEID says that it is node 0, which process \d+ on .* is\. Start one labkit process"),
        ({"JOB_COMPLETION_INDEX": "5"}, r"JOB_COMPLETION_INDEX says that it is node 5, and the notebook attaches 2"),
    ),
)
def test_s1_a_pool_whose_machines_claim_places_that_cannot_be_does_not_start(
    hosts: list[Host], tmp_path: Path, environ: dict[str, str], message: str
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def call_twice(self: attach.ShownCommand, launch: Launch) -> None:
        words = ["env", *(f"{name}={value}" for name, value in environ.items()), sys.executable, *launch.arguments()]
        started.extend(host.run(*words) for host in hosts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach.ShownCommand, "call", call_twice)
        where: dict[str, Any] = {"host": f"{NETWORK}.1", "key_file": tmp_path / "labkit.key"}
        with pytest.raises(WorkerStartError, match=f"cannot take part: {message}"):
            WorkerPool.attach(2, 1, "cpu", **where, start_timeout_s=120, replace=True)
    for process in started:
        process.terminate()  # one may not have come yet, and would wait for a notebook
        process.wait(30)


def test_machines_that_do_not_come_are_named(tmp_path: Path) -> None:
    key_file = tmp_path / "labkit.key"
    with pytest.raises(WorkerStartError, match=r"0 of 2 machines arrived in 0\.5 s; missing: node 0, node 1") as caught:
        WorkerPool.attach(2, 1, listen="tcp://127.0.0.1:*", key_file=key_file, start_timeout_s=0.5, replace=True)
    assert "listens where only programs on this machine reach it" in str(caught.value)
    assert not key_file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 0}, "num_nodes is the number of machines, at least 1, not 0"),
        ({"workers_per_node": "2"}, "workers_per_node is the number of ranks on each machine, an integer, not '2'"),
        ({"listen": "29600"}, "listen='29600' is no address"),
        ({"listen": "tcp://203.0.113.7:29600"}, "cannot listen on tcp://203.0.113.7:29600"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"key_file": "/proc/labkit.key"}, "the key file /proc/labkit.key cannot be written"),
        ({"key_file": "/no/such/folder/labkit.key"}, "cannot be written: No such file or directory"),
        ({"key_file": "/etc/hostname"}, "/etc/hostname is not a labkit key file"),
        ({"listen": "tcp://0.0.0.0:99999"}, "ports go from 1 to 65535"),
        ({"linger_s": -1}, "linger_s is how long ranks wait for a notebook, a positive number of seconds, not -1"),
        ({"linger_s": "60"}, "not '60'"),
        ({"host": "tcp://login"}, "host='tcp://login' is no name of a machine"),
        ({"host": "login:29600"}, "the port is in listen"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_way_out(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidPoolError) as caught:
        WorkerPool.attach(**{"num_nodes": 2, "workers_per_node": 1, "replace": True, "start_timeout_s": 1.0} | arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
