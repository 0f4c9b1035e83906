"""A kernel that is going to die, for test_orphans_kernel: it starts a pool, brings its ranks into every state, and ends as told.

It is run as a script. It prints the processes that it has started as one line of JSON, reads one line from stdin, and obeys it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path

from labkit import PoolStateError, WorkerPool, current_pool
from labkit.controller.start.launchers import fork_server

CHILDREN = """
import ctypes, os, subprocess, sys, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return index

batches = iter(DataLoader(Slow(), num_workers=2))
next(batches)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
child.pid
"""
# One rank in each state. The marks show, as nearly as Python can tell, that the ranks have reached it.
STATES = """
open(os.path.join(marks, str(rank)), "w").close()
if rank == 0:
    dist.barrier()
elif rank == 1:
    while True:
        pass
elif rank == 2:
    ctypes.PyDLL(None).sleep(1000)
else:
    time.sleep(1000)
"""


def interrupted_start() -> None:
    """Interrupt a start with Ctrl-C while the fork server still imports torch."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        WorkerPool(4, device="cpu")
    except KeyboardInterrupt:
        with contextlib.suppress(PoolStateError):
            current_pool()
            raise SystemExit("the broken-off start has left a pool") from None
    else:
        raise SystemExit("the start was not interrupted")


def main() -> None:
    marks, first = sys.argv[1:]
    if first == "interrupted":
        interrupted_start()
    pool = WorkerPool(4, device="cpu")
    children = pool.run_cell(CHILDREN, want_value=True)
    assert children is not None
    pool.push(marks=marks)
    told = {
        "server": fork_server.shared().pid,
        "ranks": list(pool.pids.values()),
        "children": list(children.values()),
        "directory": str(Path(pool._life.runner.members._world._directory)),
    }
    print(json.dumps(told), flush=True)
    how = sys.stdin.readline().strip()
    if how == "go to work":
        threading.Thread(target=pool.run_cell, args=(STATES,), daemon=True).start()
        how = sys.stdin.readline().strip()
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "sys.exit":
        sys.exit(3)
    elif how == "raise":
        raise RuntimeError("the script fails")
    # otherwise the script ends


main()
