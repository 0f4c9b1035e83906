"""The fastest way, under a memory limit, to keep, recompute or move the activations of each block.

The bound on time is a roofline (Williams et al., 2009): forward and backward each take as long as the slower of computation and
bus. `predict` refines this: copies overlap with later blocks only as far as the limit on bytes in flight allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, repeat

import torch
from torch import Tensor

from labkit.errors import LabkitError

DEFAULT_IN_FLIGHT = 256 << 20
_MOST_GROUPS, _MOST_STATES = 24, 300


class PlanError(LabkitError, ValueError):
    """No choice stays within the memory limit."""


class Choice(StrEnum):
    """Ways to treat a block's saved activations between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    MOVE = "move"
    MOVE_INPUTS = "move inputs, recompute"


_RECOMPUTED = (Choice.RECOMPUTE, Choice.MOVE_INPUTS)


@dataclass(frozen=True)
class BlockCost:
    """The costs of a block, measured by `labkit.spmd.offload.measure.measure_blocks`.

    Attributes:
        forward_s: Duration of its forward, in seconds.
        backward_s: Duration of its backward, in seconds, without recomputation.
        saved_bytes: Bytes of the storages that autograd saves in it, each counted once, without weights.
        input_bytes: Bytes of its inputs, which recomputation needs.
        working_bytes: Bytes of saved storages that one operation in backward needs at a time. They are on the device even if the
            block's activations move.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    input_bytes: int
    working_bytes: int = 0

    def moved(self, choice: Choice) -> int:
        """Return the bytes that leave the device."""
        return {Choice.MOVE: self.saved_bytes, Choice.MOVE_INPUTS: self.input_bytes}.get(choice, 0)

    def held(self, choice: Choice) -> int:
        """Return the bytes on the device while other blocks run."""
        return {Choice.KEEP: self.saved_bytes, Choice.RECOMPUTE: self.input_bytes}.get(choice, 0)

    def own(self, choice: Choice) -> int:
        """Return the bytes on the device while the block itself runs; bytes that move count as in flight instead."""
        return self.working_bytes if choice is Choice.MOVE else self.saved_bytes


@dataclass(frozen=True)
class Bus:
    """Bandwidth between device and host, in bytes per second, for each direction while both are in use."""

    out_bytes_per_s: float
    back_bytes_per_s: float


@dataclass(frozen=True)
class Setting:
    """The conditions under which a plan has to work.

    Attributes:
        bus: The bandwidth.
        fixed_bytes: Memory that every choice needs: parameters, gradients, optimizer state, temporary memory.
        rest_s: Seconds per step spent outside the blocks, which cannot be overlapped: head, loss, optimizer.
        max_in_flight_bytes: As for `labkit.spmd.offload.context.ActivationOffload`.
    """

    bus: Bus
    fixed_bytes: int = 0
    rest_s: float = 0.0
    max_in_flight_bytes: int = DEFAULT_IN_FLIGHT


@dataclass(frozen=True)
class OffloadPlan:
    """A choice for each block, and its predicted cost.

    Attributes:
        choices: One per block, in the order of forward.
        forward_s: Duration of the blocks' forward, in seconds: the slower of computation and bus.
        backward_s: The same for backward, including recomputation.
        step_s: Both, plus the time outside the blocks.
        peak_bytes: The most device memory.
        moved_bytes: Bytes that leave in forward; all but at most ``max_in_flight_bytes`` of them come back.
    """

    choices: tuple[Choice, ...]
    forward_s: float
    backward_s: float
    step_s: float
    peak_bytes: int
    moved_bytes: int


def roofline_seconds(costs: Sequence[BlockCost], moved_bytes: float, setting: Setting) -> float:
    """Return a lower bound on the time of a step that moves this much without recomputation.

    Forward and backward each take ``max(computation, (moved - in flight) / bandwidth)``: bytes allowed in flight need not have left
    when forward ends, and bytes that have not left need not come back.

    Ranks: local.
    """
    forward, backward = sum(cost.forward_s for cost in costs), sum(cost.backward_s for cost in costs)
    moving = max(0.0, moved_bytes - setting.max_in_flight_bytes)
    bus = setting.bus
    return max(forward, moving / bus.out_bytes_per_s) + max(backward, moving / bus.back_bytes_per_s) + setting.rest_s


def predict(costs: Sequence[BlockCost], choices: Sequence[Choice], setting: Setting) -> OffloadPlan:
    """Predict what a choice costs.

    Time: while a block runs, its bytes and those left over from the neighbouring block go over the bus. When it ends, no more than
        the limit in flight may be left. So a block takes as long as the slower of its computation and these copies.

    Memory: the peak is the largest, over all blocks, of what is held for the blocks before it, its own activations unless they
        move, and the bytes in flight.

    Raises:
        ValueError: The number of choices is not the number of blocks.

    Ranks: local.
    """
    state = _NOTHING
    for cost, choice in reversed(list(zip(costs, choices, strict=True))):
        state = _with_block(state, cost, choice, setting)
    step_s = state.forward_s + state.backward_s + setting.rest_s
    peak = setting.fixed_bytes + state.need_bytes + min(state.moved_bytes, setting.max_in_flight_bytes)
    return OffloadPlan(tuple(choices), state.forward_s, state.backward_s, step_s, peak, state.moved_bytes)


def plan_blocks(costs: Sequence[BlockCost], setting: Setting, *, limit_bytes: float) -> OffloadPlan:
    """Return the fastest choice whose predicted peak is within the limit; of equally fast ones, the one that moves least.

    To stay quick, it puts more than 24 blocks into groups of neighbours that share a choice, and thins out similar partial choices
    when there are many. The plan is then only close to the best one, but its prediction is as accurate as any other.

    Args:
        costs: One per block, in the order of forward.
        setting: Bus, fixed memory and limits.
        limit_bytes: The most device memory that the step may take.

    Raises:
        PlanError: No choice fits; the message gives the lowest possible peak.
        ValueError: There is no block.

    Ranks: local. Takes up to a few seconds.
    """
    if not costs:
        raise ValueError("there is no block to choose for")
    size = math.ceil(len(costs) / _MOST_GROUPS)
    groups = [costs[begin : begin + size] for begin in range(0, len(costs), size)]
    chosen = _candidates([_joined(group) for group in groups], setting)
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
    sizes = sum(cost.saved_bytes for cost in group), sum(cost.input_bytes for cost in group)
    return BlockCost(*times, *sizes, max(cost.working_bytes for cost in group))


@dataclass(frozen=True)
class _Partial:
    """The blocks from some block to the last: their time and memory, and the bytes that its neighbour has to carry over the bus."""

    forward_s: float
    backward_s: float
    out_waiting: float
    back_waiting: float
    moved_bytes: int
    need_bytes: int
    choices: tuple[Choice, ...]


_NOTHING = _Partial(0.0, 0.0, 0.0, 0.0, 0, 0, ())


def _with_block(state: _Partial, cost: BlockCost, choice: Choice, setting: Setting) -> _Partial:
    """Prepend a block to those in ``state``."""
    # Blocks are added from the last to the first. A row of stages with limited room between them takes equally long in either order
    # (Muth, 1979), so this is valid for forward as well as backward.
    moved, bus = cost.moved(choice), setting.bus
    again_s = cost.forward_s if choice in _RECOMPUTED else 0.0
    room = setting.max_in_flight_bytes
    forward_s, out_waiting = _over_bus(cost.forward_s, moved + state.out_waiting, bus.out_bytes_per_s, room)
    backward_s, back_waiting = _over_bus(cost.backward_s + again_s, moved + state.back_waiting, bus.back_bytes_per_s, room)
    return _Partial(
        state.forward_s + forward_s,
        state.backward_s + backward_s,
        out_waiting,
        back_waiting,
        state.moved_bytes + moved,
        max(cost.own(choice), cost.held(choice) + state.need_bytes),
        (choice, *state.choices),
    )


def _over_bus(compute_s: float, size_bytes: float, bytes_per_s: float, room_bytes: float) -> tuple[float, float]:
    """Return a block's duration, and the bytes left over for its neighbour."""
    seconds = max(compute_s, (size_bytes - room_bytes) / bytes_per_s)
    return seconds, max(0.0, size_bytes - bytes_per_s * seconds)


def _candidates(costs: Sequence[BlockCost], setting: Setting) -> list[tuple[Choice, ...]]:
    """Return all choices that no other beats in both time and memory; if there are very many, a selection."""
    # Go from the last block to the first, because what a block holds stays held through all later blocks.
    states = [_NOTHING]
    for cost in reversed(costs):
        states = _undominated([_with_block(state, cost, choice, setting) for state in states for choice in Choice])
    return [state.choices for state in states]


def _undominated(states: list[_Partial]) -> list[_Partial]:
    rows = torch.tensor(
        [[s.forward_s, s.backward_s, s.out_waiting, s.back_waiting, s.moved_bytes, s.need_bytes] for s in states],
        dtype=torch.float64,
    )
    order = torch.argsort(rows.sum(dim=1))  # a state comes after all that beat it, and after the first of its equals
    beaten = _earlier_beats(rows[order]).tolist()
    kept = [states[place] for place, is_beaten in zip(order.tolist(), beaten, strict=True) if not is_beaten]
    if len(kept) > _MOST_STATES:
        kept.sort(key=lambda state: (state.need_bytes, state.forward_s + state.backward_s))
        last = len(kept) - 1
        kept = [kept[round(place * last / (_MOST_STATES - 1))] for place in range(_MOST_STATES)]
    return kept


def _earlier_beats(rows: Tensor) -> Tensor:
    """Return, for each row, whether some earlier row is no larger in any column."""
    at_most = torch.ones(len(rows), len(rows), dtype=torch.bool)
    for column in rows.T:
        at_most &= column[:, None] <= column[None]
    return at_most.triu_(1).any(dim=0)
