"""Choose per block what becomes of its activations: keep, recompute or move, under a memory limit, at the least time.

The time is a roofline (Williams et al., 2009): in each direction a step takes as long as the slower of two, the computation
and the bus. Within that model the choice is the best one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, repeat

from labkit.errors import LabkitError

DEFAULT_IN_FLIGHT = 256 << 20
_MOST_GROUPS = 24


class PlanError(LabkitError, ValueError):
    """No choice fits under the memory limit."""


class Choice(StrEnum):
    """What becomes of a block's saved activations between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    MOVE = "move"
    MOVE_INPUTS = "move inputs, recompute"


_RECOMPUTED = (Choice.RECOMPUTE, Choice.MOVE_INPUTS)


@dataclass(frozen=True)
class BlockCost:
    """What a block costs, as `labkit.spmd.offload_measure.measure_blocks` measures it.

    Attributes:
        forward_s: Seconds of its forward.
        backward_s: Seconds of its backward, without recomputation.
        saved_bytes: Storages that autograd saves in it, each once, without weights.
        input_bytes: Of its inputs, which recomputation needs.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    input_bytes: int


@dataclass(frozen=True)
class Bus:
    """Bandwidth between device and host, in bytes per second, for each direction while both are in use."""

    out_bytes_per_s: float
    back_bytes_per_s: float


@dataclass(frozen=True)
class Setting:
    """What a plan has to live with.

    Attributes:
        bus: The bandwidth.
        fixed_bytes: What is there whatever is chosen: parameters, gradients, optimizer state, temporary memory.
        rest_s: Seconds of a step outside the blocks and not overlapped: head, loss, optimizer.
        max_in_flight_bytes: As for `labkit.spmd.offload.ActivationOffload`.
    """

    bus: Bus
    fixed_bytes: int = 0
    rest_s: float = 0.0
    max_in_flight_bytes: int = DEFAULT_IN_FLIGHT


@dataclass(frozen=True)
class Plan:
    """A choice for each block, and what it is predicted to cost.

    Attributes:
        choices: One per block, in the order of forward.
        forward_s: Seconds of the blocks' forward: the slower of computation and bus.
        backward_s: Likewise for backward, with what is recomputed.
        step_s: Both, and the rest of the step.
        peak_bytes: The most device memory.
        moved_bytes: Bytes that leave in forward; at least this less ``max_in_flight_bytes`` comes back.
    """

    choices: tuple[Choice, ...]
    forward_s: float
    backward_s: float
    step_s: float
    peak_bytes: int
    moved_bytes: int


def predict(costs: Sequence[BlockCost], choices: Sequence[Choice], setting: Setting) -> Plan:
    """What a choice costs, by the roofline.

    A direction takes ``max(computation, (moved - in flight) / bandwidth)``: what may be in flight need not have left when
    forward ends, and what has not left need not come back. It is a lower bound; it says nothing of bubbles in between.

    The peak is reached in some block: everything held for the blocks before it, and its own activations unless they move,
    and what is in flight.

    Raises:
        ValueError: There are not as many choices as blocks.
    """
    forward = sum(cost.forward_s for cost in costs)
    backward = sum(cost.backward_s for cost in costs)
    moved = need = 0
    for cost, choice in reversed(list(zip(costs, choices, strict=True))):
        moved += _moved(cost, choice)
        need = max(_own(cost, choice), _held(cost, choice) + need)
        backward += cost.forward_s if choice in _RECOMPUTED else 0.0
    in_flight = min(moved, setting.max_in_flight_bytes)
    forward_s = max(forward, (moved - in_flight) / setting.bus.out_bytes_per_s)
    backward_s = max(backward, (moved - in_flight) / setting.bus.back_bytes_per_s)
    peak = setting.fixed_bytes + need + in_flight
    return Plan(tuple(choices), forward_s, backward_s, forward_s + backward_s + setting.rest_s, peak, moved)


def plan_blocks(costs: Sequence[BlockCost], setting: Setting, *, limit_bytes: float) -> Plan:
    """The fastest choice whose predicted peak stays within the limit; among equally fast ones that which moves least.

    Up to 24 blocks the choice is exact. More are taken in groups of neighbours that share a choice, to stay quick.

    Args:
        costs: One per block, in the order of forward.
        setting: Bus, fixed memory and limits.
        limit_bytes: The most device memory that the step may take.

    Raises:
        PlanError: Nothing fits; the message says what the least possible peak is.
        ValueError: There is no block.

    Ranks: local. Takes up to some seconds.
    """
    if not costs:
        raise ValueError("there is no block to choose for")
    size = math.ceil(len(costs) / _MOST_GROUPS)
    groups = [costs[begin : begin + size] for begin in range(0, len(costs), size)]
    chosen = _candidates([_joined(group) for group in groups])
    plans = [predict(costs, list(chain(*map(repeat, choices, map(len, groups)))), setting) for choices in chosen]
    fitting = [plan for plan in plans if plan.peak_bytes <= limit_bytes]
    if not fitting:
        least = min(plan.peak_bytes for plan in plans)
        raise PlanError(
            f"no choice fits into {limit_bytes:,.0f} bytes: the least possible peak is {least:,} bytes, of which "
            f"{setting.fixed_bytes:,} are fixed. Shard over more ranks, take a smaller batch, or raise the limit."
        )
    return min(fitting, key=lambda plan: (plan.step_s, plan.moved_bytes, plan.peak_bytes))


def _joined(group: Sequence[BlockCost]) -> BlockCost:
    times = sum(cost.forward_s for cost in group), sum(cost.backward_s for cost in group)
    return BlockCost(*times, sum(cost.saved_bytes for cost in group), sum(cost.input_bytes for cost in group))


def _moved(cost: BlockCost, choice: Choice) -> int:
    return {Choice.MOVE: cost.saved_bytes, Choice.MOVE_INPUTS: cost.input_bytes}.get(choice, 0)


def _held(cost: BlockCost, choice: Choice) -> int:
    """On the device while other blocks run."""
    return {Choice.KEEP: cost.saved_bytes, Choice.RECOMPUTE: cost.input_bytes}.get(choice, 0)


def _own(cost: BlockCost, choice: Choice) -> int:
    """On the device while the block itself runs. What moves is counted as in flight."""
    return 0 if choice is Choice.MOVE else cost.saved_bytes


@dataclass(frozen=True)
class _Partial:
    """The blocks from some block to the last: what is recomputed and moved, and the memory that they need."""

    recomputed_s: float
    moved_bytes: int
    need_bytes: int
    choices: tuple[Choice, ...]


def _candidates(costs: Sequence[BlockCost]) -> list[tuple[Choice, ...]]:
    """All choices that no other choice beats in time, bytes and memory at once."""
    # From the last block to the first, because what a block holds is held through all later ones.
    states = [_Partial(0.0, 0, 0, ())]
    for cost in reversed(costs):
        grown = [
            _Partial(
                state.recomputed_s + (cost.forward_s if choice in _RECOMPUTED else 0.0),
                state.moved_bytes + _moved(cost, choice),
                max(_own(cost, choice), _held(cost, choice) + state.need_bytes),
                (choice, *state.choices),
            )
            for state in states
            for choice in Choice
        ]
        states = _undominated(grown)
    return [state.choices for state in states]


def _undominated(states: list[_Partial]) -> list[_Partial]:
    kept: list[_Partial] = []
    # Of the states so far, those that need the least memory for the bytes that they move: more bytes, less memory.
    moved: list[int] = []
    needs: list[int] = []
    for state in sorted(states, key=lambda state: (state.recomputed_s, state.moved_bytes, state.need_bytes)):
        place = bisect_right(moved, state.moved_bytes)
        if place and needs[place - 1] <= state.need_bytes:
            continue
        kept.append(state)
        end = place
        while end < len(moved) and needs[end] >= state.need_bytes:
            end += 1
        begin = bisect_left(moved, state.moved_bytes)
        moved[begin:end], needs[begin:end] = [state.moved_bytes], [state.need_bytes]
    return kept
