"""Prediction of one rank's memory in a training step under FSDP2, from a few sizes of the model, for any number of ranks.

A peak occurs at one moment, so it is not a sum over the step. The code therefore walks through the step: first the moment when all
blocks have run forward, then each block's backward. At each point it adds up the whole parameters, what is held, and the gradients
that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from labkit.spmd.memory.kinds import held_memory, measured_peak
from labkit.spmd.offload.measure import measure_blocks
from labkit.spmd.offload.plan import DEFAULT_IN_FLIGHT, BlockCost, Choice

PARTS = ("parameters", "gathered", "gradients", "optimizer", "activations", "in flight", "temporary")


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a model and its batch, measured by `measure_sizes`.

    Attributes:
        block_elements: Parameters of each separately sharded block, in the order of forward.
        root_elements: Parameters outside the blocks. They stay gathered from forward to the end of backward.
        costs: The cost of each block, measured in the dtype of the computation.
        head_bytes: Additional memory while the loss is computed: logits and their gradient.
    """

    block_elements: tuple[int, ...]
    root_elements: int
    costs: tuple[BlockCost, ...]
    head_bytes: int

    def __post_init__(self) -> None:
        if not self.costs or len(self.costs) != len(self.block_elements):
            raise ValueError(f"{len(self.costs)} costs for {len(self.block_elements)} blocks; each block needs one")


@dataclass(frozen=True)
class Sharding:
    """The distribution of the model over ranks, and the size of its numbers.

    Attributes:
        num_shards: Ranks over which parameters, gradients and optimizer state are sharded; with HSDP, the ranks of one replica.
        stored_bytes: Bytes of one element of a parameter, its gradient and each moment, as sharded.
        computed_bytes: Bytes of one element of a parameter and its gradient while its block runs
            (``MixedPrecisionPolicy.param_dtype``).
        reduced_bytes: Bytes of one element of a gradient while it is reduced (``MixedPrecisionPolicy.reduce_dtype``). None for what
            torch does without a ``reduce_dtype``: it reduces as it computes up to 2.14, and as the parameter is stored since 2.15.
        num_moments: Moments that the optimizer keeps: 2 for Adam.
    """

    num_shards: int = 1
    stored_bytes: int = 4
    computed_bytes: int = 4
    reduced_bytes: int | None = None
    num_moments: int = 2

    @property
    def bytes_in_reduction(self) -> int:
        """Bytes of one element of a gradient while it is reduced."""
        if self.reduced_bytes is not None:
            return self.reduced_bytes
        return self.stored_bytes if torch.__version__ >= "2.15" else self.computed_bytes


def predict_peak(
    sizes: StepSizes, choices: Sequence[Choice], sharding: Sharding, *, max_in_flight_bytes: int = DEFAULT_IN_FLIGHT
) -> dict[str, int]:
    """Return the parts of one rank's memory, in bytes, at the peak of a step, in the order of `PARTS`.

    Each block and the root are units of ``fully_shard`` with its defaults. In backward, a block is gathered again while the block
    after it runs, and its gradients are reduced while the block before it runs. Padding of uneven shards, step counters, buffers
    and inputs are not included. On small models the result is within 5 % of torch's tracker (tests/unit/test_memory_plan.py).

    Args:
        sizes: The model and its batch.
        choices: The choice for each block's activations, one per block.
        sharding: Ranks and dtypes.
        max_in_flight_bytes: As for `labkit.spmd.offload.context.ActivationOffload`.

    Raises:
        ValueError: The number of choices is not the number of blocks.

    Ranks: local.
    """
    if len(choices) != len(sizes.costs):
        raise ValueError(f"{len(choices)} choices for {len(sizes.costs)} blocks; each block needs one")
    places = range(len(choices))
    moments = [_parts_at(place, sizes, choices, sharding, max_in_flight_bytes) for place in (None, *reversed(places))]
    return max(moments, key=lambda parts: sum(parts.values()))


def _parts_at(
    place: int | None, sizes: StepSizes, choices: Sequence[Choice], sharding: Sharding, max_in_flight_bytes: int
) -> dict[str, int]:
    """Return the memory during a block's backward or, for None, at the end of forward, while the loss is computed."""
    whole, elements = sharding.computed_bytes, sizes.block_elements
    share = sharding.stored_bytes / sharding.num_shards
    held = [cost.held(choice) for cost, choice in zip(sizes.costs, choices, strict=True)]
    gathered, gradients, activations, temporary = sizes.root_elements, 0.0, sum(held), sizes.head_bytes
    if place is not None:
        activations = sum(held[:place]) + sizes.costs[place].own(choices[place])
        temporary = sizes.costs[place].working_bytes  # an operation's gradients are as large as its tensors
        before = elements[place - 1] if place else 0
        after = elements[place + 1] if place + 1 < len(elements) else 0
        if sharding.num_shards > 1:
            # This block runs while the block before it is gathered and the gradients of the block after it are reduced.
            gathered += elements[place] + before
            gradients += elements[place] * whole + after * sharding.bytes_in_reduction
        gradients += sum(elements[place + 1 :]) * share
    num_parameters = sum(elements) + sizes.root_elements
    moving = sum(cost.moved(choice) for cost, choice in zip(sizes.costs, choices, strict=True))
    return dict(
        zip(
            PARTS,
            (
                round(num_parameters * share),
                gathered * whole if sharding.num_shards > 1 else 0,
                round(gradients),
                round(num_parameters * share * sharding.num_moments),
                activations,
                min(moving, max_in_flight_bytes),
                temporary,
            ),
            strict=True,
        )
    )


def measure_sizes(
    model: nn.Module, blocks: Sequence[nn.Module], optimizer: torch.optim.Optimizer, step: Callable[[], object]
) -> StepSizes:
    """Measure an unsharded model with the batch of one rank.

    Args:
        model: The model, after at least one step, so that the optimizer has its state.
        blocks: All blocks that are to be sharded separately, as for `labkit.spmd.offload.measure.measure_blocks`.
        optimizer: The optimizer of the model.
        step: Forward, backward, optimizer step, and gradients reset to None. It is called four times.

    Ranks: local.
    """
    costs = measure_blocks(blocks, step, repeats=1)
    held = held_memory(model, optimizer).total
    peak = measured_peak(step, next(model.parameters()).device, held)
    elements = tuple(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
    root = sum(parameter.numel() for parameter in model.parameters()) - sum(elements)
    return StepSizes(elements, root, tuple(costs), max(0, peak - held - sum(cost.saved_bytes for cost in costs)))
