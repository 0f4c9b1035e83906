"""The training step that runs in a pool's cell, or, when this file is torchrun's script, without a pool."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.spmd.model.transformer import next_token_loss
from tests.benchmarks.gpu_steps import DEVICE, random_model, random_tokens, synchronize, wide

NUM_STEPS, ROUNDS = 20, 3
KINDS = ("fused", "default")


class Training:
    """A model of 617 million parameters in bfloat16 under FSDP2."""

    def __init__(self) -> None:
        config = wide(2048)
        self.model = random_model(config, torch.bfloat16)
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        for module in (*self.model.layers, self.model):
            fully_shard(module, mesh=mesh)
        self.batch = random_tokens(config)
        self.use("fused")

    def use(self, kind: str) -> None:
        """Go on with an Adam that updates all in one kernel, ``fused``, or as torch chooses by itself, ``default``."""
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=kind == "fused" or None)
        for _ in range(5):
            self.step()

    def step(self) -> None:
        """One step of training."""
        next_token_loss(self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rounds(self) -> dict[str, list[float]]:
        """Seconds of a step: the mean over twenty steps in a row, three times; by kind of Adam."""
        return {kind: self._rounds(kind) for kind in KINDS}

    def _rounds(self, kind: str) -> list[float]:
        self.use(kind)
        found = []
        for _ in range(ROUNDS):
            synchronize()
            began_s = time.perf_counter()
            for _ in range(NUM_STEPS):
                self.step()
            synchronize()
            found.append((time.perf_counter() - began_s) / NUM_STEPS)
        return found


if __name__ == "__main__":
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    print("seconds", json.dumps(Training().rounds()), flush=True)
    dist.destroy_process_group()
