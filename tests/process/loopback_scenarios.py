"""Pools beside a neighbour who wants to be a peer of their ranks; each scenario in a network namespace of its own.

Usage as root: ``unshare --net python -m tests.process.loopback_scenarios SCENARIO``. It prints the result as a line of JSON.
The namespace keeps the neighbour, who attacks every new port of this user, away from everybody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit import RankFailedError, WorkerPool
from labkit.errors import WorkerStartError
from tests.process import neighbour

# Who connects first is a matter of luck; with this many tries it is sometimes the neighbour.
TRIES = 30
SUM = "import torch, torch.distributed as dist\nones = torch.ones(1)\ndist.all_reduce(ones)\nfloat(ones)"
# Rank 3 comes late, and the others wait for it at their ports.
NEW_GROUP = """
import pathlib, time
flag = pathlib.Path({flag!r})
try:
    if rank == 3:
        time.sleep(0.5)
    group = dist.new_group([0, 1, 2, 3])
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
finally:
    if rank == 0:
        flag.unlink(missing_ok=True)
float(ones)
"""


@contextlib.contextmanager
def stranger(flag: Path, found: dict[str, Any]) -> Iterator[None]:
    """Run the neighbour during the block; afterwards ``found`` has its counts of ports and bytes."""
    command = [sys.executable, neighbour.__file__, "race", str(os.getuid()), str(flag)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            found.update(json.loads(process.communicate("\n", timeout=30)[0]))


def start(flag: Path) -> dict[str, Any]:
    """Start pools until one is refused; the others work."""
    found: dict[str, Any] = {"sums": []}
    flag.touch()
    with stranger(flag, found):
        for _ in range(TRIES):
            try:
                with WorkerPool(3, device="cpu", start_timeout_s=30) as pool:
                    found["sums"].append(pool.run_cell(SUM, want_value=True, timeout_s=20).same())  # type: ignore[union-attr]
            except WorkerStartError as error:
                found["told"] = error.stderr_tail
                break
    with WorkerPool(3, device="cpu") as pool:
        found["after"] = pool.run_cell(SUM, want_value=True, timeout_s=20).same()  # type: ignore[union-attr]
    return found


def new_group(flag: Path) -> dict[str, Any]:
    """Make groups until one is refused; the others work, and so does the pool."""
    found: dict[str, Any] = {"sums": []}
    with WorkerPool(4, device="cpu") as pool:
        pool.run_cell(SUM + "\nkept = rank")
        before = pool.pids
        with stranger(flag, found):
            for _ in range(TRIES):
                flag.touch()
                try:
                    results = pool.run_cell(NEW_GROUP.format(flag=str(flag)), want_value=True, timeout_s=20)
                    found["sums"].append(results.same())  # type: ignore[union-attr]
                except RankFailedError as error:
                    found["kinds"] = sorted({failure.type_name for failure in error.failures if failure.kind == "exception"})
                    found["told"] = str(error)
                    break
        found["after"] = pool.run_cell(SUM, want_value=True, timeout_s=20).same()  # type: ignore[union-attr]
        found["kept"] = list(pool.pull("kept").values()) if pool.pids == before else None
    return found


def bring_loopback_up() -> None:
    """Switch the loopback device on; in a new namespace it is down."""
    with socket.socket() as item:
        fcntl.ioctl(item, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


def main() -> None:
    """Run one scenario."""
    bring_loopback_up()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        found = {"start": start, "new_group": new_group}[sys.argv[1]](Path(folder) / "flag")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
