"""Records of events in one rank's training: plain data without torch, so that the kernel can read and draw them."""

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
# In a ring, each rank passes on every piece but one: once in a gather or scatter, twice in an all-reduce.
_RING_PASSES = {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 2}


@dataclass(frozen=True)
class Collective:
    """One collective call, as one rank made it.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast`` and so on: one name for all of torch's spellings.
        size_bytes: Bytes of the whole tensor: the output of an all-gather, the input of a reduce-scatter, the tensor of an
            all-reduce.
        group_size: Ranks in its process group.
        began_s: Seconds from the beginning of the recording to the call.
        duration_s: Seconds that the call took on the host; on a GPU it returns before the data have arrived.
        group: torch's name of the process group, equal on all ranks; ``""`` if it was not recorded.
    """

    kind: str
    size_bytes: int
    group_size: int
    began_s: float
    duration_s: float
    group: str = ""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends if the group runs it as a ring; 0 for collectives that have no ring."""
        return _RING_PASSES.get(self.kind, 0) * self.size_bytes * (self.group_size - 1) // self.group_size


@dataclass(frozen=True)
class Event:
    """One action of the runtime on one rank.

    Attributes:
        kind: ``unshard``, ``wait`` or ``reshard``; ``forward_begin`` to ``backward_end`` for a block's computation; or the kind of
            a `Collective`.
        block: FQN of the module that the parameter group belongs to (several are joined by commas), ``root`` for the model itself,
            ``""`` for a collective that belongs to no group.
        phase: ``backward`` while autograd runs, ``forward`` while a sharded module runs forward, else ``outside``.
        changes: Whether it changed anything. False for an unshard of parameters that are already whole or being gathered, a wait
            with nothing to wait for, and a reshard that freed nothing.
        size_bytes: Memory that an unshard takes or a reshard frees; for a collective, as in `Collective`; else 0.
        began_s: Seconds from the beginning of the trace.
        duration_s: Seconds that it took on the host; on a GPU, this is the time to enqueue the work, not to do it.
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
class TracedBlock:
    """One parameter group.

    Attributes:
        name: As in `Event.block`.
        whole_bytes: Bytes of its unsharded parameters, in the dtype of the computation.
        shard_bytes: Bytes of its parameters that this rank keeps between steps.
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
        events: The events in the order in which this rank began them.
        start_s: The host's monotonic clock at the beginning. Ranks on the same machine share this clock.
    """

    rank: int
    world_size: int
    blocks: tuple[TracedBlock, ...]
    events: tuple[Event, ...] = field(repr=False)
    start_s: float = 0.0

    def order(self, *, phase: Phase | None = None, names: bool = True) -> tuple[str, ...]:
        """Return the unshards and reshards that changed something, such as ``("U root", "U layers.0", "R layers.0")``.

        Args:
            phase: Return only events in this phase.
            names: If False, use only the last part of each FQN: ``U 0`` for ``U layers.0``.
        """
        chosen = (event for event in self.events if event.kind in _LETTERS and event.changes and phase in (None, event.phase))
        return tuple(str(event) if names else f"{_LETTERS[event.kind]} {short_name(event.block)}" for event in chosen)

    def calls(self, kind: str) -> tuple[int, int]:
        """Return how often this kind of event occurred, and how often it changed anything."""
        found = [event.changes for event in self.events if event.kind == kind]
        return len(found), sum(found)

    def collectives(self, block: str | None = None) -> tuple[Collective, ...]:
        """Return the collectives, all of them or those of one block."""
        return tuple(
            Collective(event.kind, event.size_bytes, event.group_size, event.began_s, event.duration_s)
            for event in self.events
            if event.group_size and block in (None, event.block)
        )

    def counts(self) -> dict[str, int]:
        """Return the number of collectives of each kind."""
        return dict(Counter(call.kind for call in self.collectives()))

    def live_bytes(self) -> tuple[int, ...]:
        """Return, after each event, the bytes of parameters that are whole or being gathered, beyond the shards.

        The trace does not record which groups were whole when it began. If their reshards make the sum negative, the whole curve is
        raised to stay at 0 or above.
        """
        total, levels = 0, []
        for event in self.events:
            if event.kind == UNSHARD:
                total += event.size_bytes
            elif event.kind == RESHARD:
                total -= event.size_bytes
            levels.append(total)
        # Groups that were whole before the first event can make the running sum negative when they reshard.
        before = max(0, -min(levels, default=0))
        return tuple(level + before for level in levels)

    @property
    def peak_live_bytes(self) -> int:
        """The largest value of `live_bytes`."""
        return max(self.live_bytes(), default=0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in all recorded collectives, if each runs as a ring."""
        return sum(call.sent_bytes for call in self.collectives())

    def __str__(self) -> str:
        found = ", ".join(f"{count} {kind}" for kind, count in self.counts().items()) or "no collectives"
        return f"rank {self.rank}: {len(self.events)} events, {found}"

    __repr__ = __str__


def short_name(block: str) -> str:
    """Return the last part of a block's FQN, ``2`` for ``layers.2``; for several modules, the first and last such parts."""
    parts = [name.rsplit(".", 1)[-1] for name in block.split(", ")]
    return parts[0] if len(parts) == 1 else f"{parts[0]}-{parts[-1]}"


def first_difference(orders: dict[str, Iterable[str]]) -> str:
    """Describe the first place where event orders differ; return an empty string if all are equal.

    Args:
        orders: The orders to compare, by name, for example ``{"rank 0": trace.order()}``.
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
