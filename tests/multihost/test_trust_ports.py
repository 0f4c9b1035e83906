"""A stranger who reaches the ports of an attached pool without its key cannot run code there through labkit.

The remaining risk is torch's, not labkit's: the store in which ranks meet requires no key. A stranger who reaches it can read,
change and delete what ranks leave there for each other, and so prevent the next groups, or redirect a rank's connections. gloo and
NCCL require no key either, so the stranger is then between two ranks. If these ranks exchange objects (`all_gather_object`,
`broadcast_object_list`, a checkpoint's plans), the stranger's data is unpickled, which can run code. The README, the notebook
(beside the command) and `labkit doctor` say so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit import WorkerPool
from tests.multihost.hosts import NETWORK, Host
from tests.process import stranger
from tests.process.patience import until
from tests.process.ports import listening

SUM = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"
# torchrun's agent on this side; its worker does nothing for long enough.
TORCHRUN = "-m torch.distributed.run --nnodes 1:2 --rdzv-backend c10d --rdzv-id none"


@pytest.fixture
def canary() -> Iterator[Path]:
    """The canary: a file that exists only if an attack has run code."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder) / "canary"


def attack(host: Host | None, canary: Path, places: set[tuple[str, int]]) -> dict[str, Any]:
    """Return the attacks that worked at these places, from that host or from the notebook's machine."""
    inside = ["ip", "netns", "exec", host.namespace] if host is not None else []
    command = [*inside, sys.executable, stranger.__file__, str(canary), *(f"{address}:{port}" for address, port in sorted(places))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_s1_the_attack_runs_code_where_torchrun_s_c10d_rendezvous_is_open(hosts: list[Host], canary: Path) -> None:
    """The attack itself works: labkit's agents were once started in this way."""
    address = hosts[0].address
    process = hosts[0].run(
        sys.executable, *f"{TORCHRUN} --rdzv-endpoint {address}:29500 --rdzv-conf is_host=1 --no-python sleep 90".split()
    )
    until(lambda: [place for place in listening(hosts[0].pids) if place[1] == 29500], "torchrun's store is open", 60)
    found = attack(hosts[1], canary, {(address, 29500)})
    assert found[f"{address}:29500"]["read"] > 0
    until(canary.exists, "torchrun has unpickled what a stranger wrote", 60)
    process.kill()


@pytest.fixture
def pool(hosts: list[Host], called: list[Any], tmp_path: Path) -> Iterator[WorkerPool]:
    where = {"listen": f"tcp://{NETWORK}.1:*", "host": f"{NETWORK}.1", "key_file": tmp_path / "labkit.key"}
    with WorkerPool.attach(2, 2, "cpu", **where, start_timeout_s=180, replace=True) as pool:  # type: ignore[arg-type]
        yield pool


def test_s1_a_stranger_who_reaches_every_port_runs_no_code_and_the_pool_goes_on(
    pool: WorkerPool, hosts: list[Host], canary: Path
) -> None:
    pool.run_cell(f"{SUM}\nkept = rank")
    open_there = {place for host in hosts for place in listening(host.pids)}
    for host in hosts:
        assert {address for address, _ in listening(host.pids)} == {host.address}  # the one interface on the way to the others
    notebook = listening([psutil.Process().pid, *(item.pid for item in psutil.Process().children(recursive=True))])
    own = {place for place in notebook if place[1] == pool._life.site.nodes.port}  # type: ignore[attr-defined]
    assert own == {(f"{NETWORK}.1", pool._life.site.nodes.port)}  # type: ignore[attr-defined]
    for where in (hosts[1], None):
        found = attack(where, canary, open_there | own)
        assert not any(item.get("let in") for item in found.values())
        assert sum("read" in item for item in found.values()) == 1  # torch's own store, which asks nobody
    assert pool.run_cell(SUM, want_value=True, timeout_s=60).same() == 4.0  # type: ignore[union-attr]
    pool.restart([3])
    assert pool.run_cell(SUM, want_value=True, timeout_s=60).same() == 4.0  # type: ignore[union-attr]
    assert pool.pull("kept", ranks="0-2") == {0: 0, 1: 1, 2: 2}
    pool.restart()
    assert pool.run_cell(SUM, want_value=True, timeout_s=60).same() == 4.0  # type: ignore[union-attr]
    assert not canary.exists()
