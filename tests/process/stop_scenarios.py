"""Programs for the tests of verdicts, on four ranks: correct ones, whose stop blames no rank, and incorrect ones that hang.

:data:`PREPARE` runs once before them.
"""

from __future__ import annotations

PREPARE = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

def sharded(mesh):
    model = net()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model

models = {
    "FSDP2": sharded(init_device_mesh("cpu", (4,))),
    "FSDP1": FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True),
    "DDP": DistributedDataParallel(net()),
    "HSDP": sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
}
optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}

def train(name):
    model, optimizer = models[name], optimizers[name]
    while True:
        model(torch.ones(2, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
odd_and_even = [dist.new_group([0, 2]), dist.new_group([1, 3])]
kept = rank * 10
t = torch.ones(10)
"""

RIGHT = {
    "bare all_reduce": "while True:\n    dist.all_reduce(torch.ones(10))",
    "all_reduce and barrier": "while True:\n    dist.all_reduce(torch.ones(10))\n    dist.barrier()",
    "broadcast": "while True:\n    for source in range(4):\n        dist.broadcast(torch.ones(10), source)",
    "FSDP2": "train('FSDP2')",
    "FSDP1": "train('FSDP1')",
    "DDP": "train('DDP')",
    "HSDP": "train('HSDP')",
    "pipeline": """
while True:
    if rank > 0:
        dist.recv(t, rank - 1)
    if rank < 3:
        dist.send(t, rank + 1)
""",
    "subgroups": """
while True:
    dist.all_reduce(torch.ones(10), group=halves[rank // 2])
    dist.all_reduce(torch.ones(10), group=odd_and_even[rank % 2])
""",
    "object collectives": """
while True:
    told = [None] * 4
    dist.all_gather_object(told, {"rank": rank, "text": "x" * 10 * rank})
    dist.broadcast_object_list(told, 1)
""",
}

# Rank 2 is at fault unless the name says otherwise. Beside each program is the text that the verdict has to contain.
WRONG = {
    "a rank skips a call": (
        "for i in range(20):\n    if not (rank == 2 and i == 7):\n        dist.all_reduce(t)",
        r"rank 2 finished the cell; ranks 0-1, 3 wait in all_reduce #\d+ at Cell In\[1\], line 3 for it",
    ),
    "another operation": (
        "dist.all_reduce(t)\nif rank == 2:\n    dist.barrier()\nelse:\n    dist.all_reduce(t)",
        r"different collectives: ranks 0-1, 3 in all_reduce #\d+ at .*; rank 2 in barrier #\d+",
    ),
    "another order": (
        "calls = [lambda: dist.all_reduce(t), dist.barrier]\nfor call in calls[::-1] if rank == 2 else calls:\n    call()",
        r"different collectives: ranks 0-1, 3 in all_reduce #\d+ at .*; rank 2 in barrier #\d+",
    ),
    "another shape": (
        "dist.all_reduce(torch.ones(1 + (rank == 2)))",  # with most other shapes gloo ends the process
        r"all_reduce #\d+ with different shapes: .*rank 2 sent \[2\]",
    ),
    "another group": (
        "dist.all_reduce(t, group=halves[1] if rank == 2 else None)",
        r"different process groups: .*; rank 2 in all_reduce #\d+ of a group of ranks 2-3 at",
    ),
    "another source": (
        "dist.broadcast(torch.ones(10), src=1 if rank == 2 else 0)",
        r"different sources: rank 0 in broadcast #\d+ with source 0 at .*; rank 2 in broadcast #\d+ with source 1",
    ),
    "a message that rank 1 does not receive": (
        "if rank == 0:\n    dist.send(t, 1)",
        r"rank 1 finished the cell; rank 0 waits in send .*for it",
    ),
    "one barrier more": (
        "dist.all_reduce(t)\nif rank == 2:\n    dist.barrier()\ndist.all_reduce(t)",
        r"different collectives: ranks 0-1, 3 in all_reduce #\d+ at .*; rank 2 in barrier #\d+",
    ),
    "an early return": (
        "def work():\n    dist.all_reduce(t)\n    if rank == 2:\n        return\n    dist.all_reduce(t)\nwork()",
        r"rank 2 finished the cell; ranks 0-1, 3 wait in all_reduce #\d+ at Cell In\[1\], line 5 for it",
    ),
    "an exception": (
        "dist.all_reduce(t)\nif rank == 2:\n    raise ValueError('planted')\ndist.all_reduce(t)",
        r"rank 2 failed; ranks 0-1, 3 wait in all_reduce #\d+ at Cell In\[1\], line 4 for it",
    ),
}
