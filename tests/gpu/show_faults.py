"""Print the output that a reader sees when a run on two GPUs fails in three ways: ``python -m tests.gpu.show_faults``.

Notebook 00 shows this output to readers without a GPU.
"""

from __future__ import annotations

import time

import labkit
from labkit.errors import RunReport

FAULTS = {
    "A rank leaves out an all-reduce; the time limit of 4 s interrupts the other inside NCCL": (
        'x = torch.ones(4, device=device)\nif rank == 0:\n    dist.all_reduce(x)\nprint("rank", rank, "goes on")'
    ),
    "A rank is killed while the other waits for it inside NCCL": (
        "import os, signal, time\n"
        "x = torch.ones(4, device=device)\n"
        "if rank == 1:\n    time.sleep(1)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(x)"
    ),
    "A rank runs out of memory before an all-reduce": (
        "blocks = []\nwhile rank == 0:\n    blocks.append(torch.empty(1 << 32, dtype=torch.uint8, device=device))\n"
        "x = torch.ones(4, device=device)\n"
        "dist.all_reduce(x)"
    ),
}
AFTER = "ones = torch.ones(1, device=device)\ndist.all_reduce(ones)\nkept, ones.item()"


def main() -> None:
    """Run each fault on a pool of two, and after it a cell that needs both ranks and their variables."""
    with labkit.WorkerPool(2, device="cuda", replace=True) as pool:
        for what, cell in FAULTS.items():
            pool.run_cell("import torch, torch.distributed as dist\nkept = 10 + rank")
            print(f"== {what}\n{cell}\n--")
            began_s = time.perf_counter()
            try:
                pool.run_cell(cell, timeout_s=4)
            except RunReport as report:
                print(f"{type(report).__name__}: {report}")
            print(f"-- the cell ended after {time.perf_counter() - began_s:.1f} s")
            if dead := pool.dead_ranks:
                began_s = time.perf_counter()
                pool.restart(dead)
                print(f"-- pool.restart({list(dead)}) took {time.perf_counter() - began_s:.1f} s")
                pool.run_cell("import torch, torch.distributed as dist\nif rank == 1:\n    kept = 'fresh'")
            began_s = time.perf_counter()
            print(dict(pool.run_cell(AFTER, want_value=True) or {}), f"after {time.perf_counter() - began_s:.2f} s\n", flush=True)


if __name__ == "__main__":
    main()
