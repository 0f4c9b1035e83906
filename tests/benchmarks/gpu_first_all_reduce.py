"""torchrun's script for the start-up benchmark: form a group, reduce once, print the time of day."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

device = torch.device("cpu" if os.environ.get("LABKIT_BENCH_REHEARSAL") == "1" else f"cuda:{os.environ['LOCAL_RANK']}")
dist.init_process_group("gloo" if device.type == "cpu" else "nccl", device_id=None if device.type == "cpu" else device)
one = torch.ones(1, device=device)
dist.all_reduce(one)
one.item()
print(f"done at {time.time():.6f}", flush=True)
dist.destroy_process_group()
