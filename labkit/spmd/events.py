"""What a rank did with its parameters, as plain records without torch, so that the kernel can read and draw them without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["forward", "backward", "outside"]

ROOT = "root"
UNSHARD, WAIT, RESHARD = "unshard", "wait", "reshard"
FORWARD_BEGIN, FORWARD_END = "forward_begin", "forward_end"
BACKWARD_BEGIN, BACKWARD_END = "backward_begin", "backward_end"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"

_LETTERS = {UNSHARD: "U", RESHARD: "R"}
# A ring passes all pieces but the rank's own: once for a gather or a scatter, once each way for an all-reduce.
_RING_PASSES = {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 2}


@dataclass(frozen=True)
class Collective:
    """One collective call, as one rank made it.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast`` and so on: one name for all spellings of torch.
        size_bytes: Bytes of the whole: what an all-gather gives, what a reduce-scatter takes, what an all-reduce changes.
        group_size: Ranks in its process group.
        began_s: Seconds from the beginning of the recording to the call.
        duration_s: Seconds that the call took on the host. On a GPU it returns before the data has arrived.
        group: torch's name of the process group, equal on all ranks; ``""`` where it was not recorded.
    """

    kind: str
    size_bytes: int
    group_size: int
    began_s: float
    duration_s: float
    group: str = ""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends when the group does it in a ring; 0 for collectives of another kind."""
        return _RING_PASSES.get(self.kind, 0) * self.size_bytes * (self.group_size - 1) // self.group_size


@dataclass(frozen=True)
class Event:
    """One thing that the runtime did on one rank.

    Attributes:
        kind: ``unshard``, ``wait``, ``reshard``; ``forward_begin`` to ``backward_end`` for the computation of a block; or the
            kind of a `Collective`.
        block: FQN of the module that the parameter group belongs to, ``root`` for the model itself, ``""`` for a collective
            that belongs to no group. Several modules in one group are joined by a comma.
        phase: ``backward`` while autograd runs, ``forward`` while a sharded module does, else ``outside``.
        changes: Whether it changed something. False for an unshard of parameters that are whole or on their way already, for
            a wait with nothing to wait for, and for a reshard that freed nothing.
        size_bytes: Memory that an unshard takes or a reshard gives back; for a collective as in `Collective`; else 0.
        began_s: Seconds from the beginning of the trace.
        duration_s: Seconds that it took on the host. On a GPU this is the time to enqueue it, not the time to do it.
        group_size: For a collective, the ranks in its process group; else 0.
    """

    kind: str
    block: str
    phase: Phase
    changes: bool
    size_bytes: int
    began_s: float
    duration_s: float
    group_size: int = 0

    def __str__(self) -> str:
        return f"{_LETTERS.get(self.kind, self.kind)} {self.block}".rstrip()


@dataclass(frozen=True)
class Block:
    """One parameter group.

    Attributes:
        name: As in `Event.block`.
        whole_bytes: Its parameters unsharded, in the dtype that they are computed in.
        shard_bytes: What this rank keeps of them between two steps.
    """

    name: str
    whole_bytes: int
    shard_bytes: int


@dataclass(frozen=True)
class Trace:
    """Everything that one rank recorded; made by `labkit.spmd.record_events`.

    Attributes:
        rank: The rank.
        world_size: The number of ranks.
        blocks: The parameter groups in the order of the model's modules, the root first.
        events: What happened, in the order in which this rank began it.
        start_s: The host's monotonic clock at the beginning. Ranks of one machine share it.
    """

    rank: int
    world_size: int
    blocks: tuple[Block, ...]
    events: tuple[Event, ...] = field(repr=False)
    start_s: float = 0.0

    def order(self, *, phase: Phase | None = None, names: bool = True) -> tuple[str, ...]:
        """The unshards and reshards that changed something, such as ``("U root", "U layers.0", "R layers.0")``.

        Args:
            phase: Only what happened in this phase.
            names: False for short names, the last part of the FQN: ``U 0`` for ``U layers.0``.
        """
        chosen = (event for event in self.events if event.kind in _LETTERS and event.changes and phase in (None, event.phase))
        return tuple(str(event) if names else f"{_LETTERS[event.kind]} {short_name(event.block)}" for event in chosen)

    def calls(self, kind: str) -> tuple[int, int]:
        """How often something was called, and how often it changed something."""
        found = [event.changes for event in self.events if event.kind == kind]
        return len(found), sum(found)

    def collectives(self, block: str | None = None) -> tuple[Collective, ...]:
        """The collectives, all or those of one block."""
        return tuple(
            Collective(event.kind, event.size_bytes, event.group_size, event.began_s, event.duration_s)
            for event in self.events
            if event.group_size and block in (None, event.block)
        )

    def counts(self) -> dict[str, int]:
        """How many collectives of each kind."""
        return dict(Counter(call.kind for call in self.collectives()))

    def live_bytes(self) -> tuple[int, ...]:
        """After each event, the bytes of parameters that are whole or on their way, beyond the shards.

        It counts from 0 at the beginning of the trace. A group that is whole when the trace begins comes in at its reshard.
        """
        total, levels = 0, []
        for event in self.events:
            if event.kind == UNSHARD:
                total += event.size_bytes
            elif event.kind == RESHARD:
                total -= event.size_bytes
            levels.append(total)
        # What was whole before the first event shows as a negative rest at the end of the sum.
        before = max(0, -min(levels, default=0))
        return tuple(level + before for level in levels)

    @property
    def peak_live_bytes(self) -> int:
        """The largest of `live_bytes`."""
        return max(self.live_bytes(), default=0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in all recorded collectives, in rings."""
        return sum(call.sent_bytes for call in self.collectives())

    def __str__(self) -> str:
        found = ", ".join(f"{count} {kind}" for kind, count in self.counts().items()) or "no collectives"
        return f"rank {self.rank}: {len(self.events)} events, {found}"

    __repr__ = __str__


def short_name(block: str) -> str:
    """The last part of a block's FQN, ``2`` for ``layers.2``; of several modules in a group the first and the last."""
    parts = [name.rsplit(".", 1)[-1] for name in block.split(", ")]
    return parts[0] if len(parts) == 1 else f"{parts[0]}-{parts[-1]}"


def first_difference(orders: dict[str, Iterable[str]]) -> str:
    """Where event orders part, in words; empty when all are equal.

    Args:
        orders: A name for each order, for example ``{"rank 0": trace.order()}``.
    """
    (first_name, first), *others = [(name, tuple(order)) for name, order in orders.items()]
    for name, order in others:
        for place, (left, right) in enumerate(zip(first, order, strict=False), start=1):
            if left != right:
                return f"event {place} is {left!r} in {first_name} and {right!r} in {name}"
        if len(first) != len(order):
            longer = first_name if len(first) > len(order) else name
            return f"{longer} has {abs(len(first) - len(order))} more, from event {min(len(first), len(order)) + 1} on"
    return ""
