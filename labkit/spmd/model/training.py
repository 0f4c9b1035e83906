"""The training loop of the course, for a plain, sharded or replicated model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.spmd.model.transformer import next_token_loss
from labkit.spmd.shards.sharding import check_optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Tensor], num_steps: int) -> list[float]:
    """Train on the next batches and return the loss of each step.

    Args:
        model: A model over bytes. With several ranks, its wrapper must average the gradients over them.
        optimizer: Built from the model's current parameters.
        batches: This rank's batches, int64 (rows, seq + 1), such as a `BatchSampler`.
        num_steps: Optimizer steps to take.

    Returns:
        The mean loss over the global batch for each step, in nats per byte, computed before the update; equal on all ranks.

    Raises:
        ShardingError: The optimizer holds tensors that are not parameters of the model.

    Ranks: collective, over the default process group if there is one.
    Blocks: in the collectives of ``num_steps`` steps.
    """
    check_optimizer(model, optimizer)
    losses = []
    for batch in islice(batches, num_steps):
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if not losses:
        return []
    mean = torch.stack(losses)
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return [float(value) for value in mean]
