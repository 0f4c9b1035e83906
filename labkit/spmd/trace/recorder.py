"""Recording of when a sharded model's parameters are whole: every unshard, wait, reshard, collective, forward and backward.

It works for both FSDP1 and FSDP2; for a plain model or one under DDP, it records only collectives.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labkit.spmd.trace.collectives import CollectiveMode
from labkit.spmd.trace.events import (
    RESHARD,
    ROOT,
    UNSHARD,
    WAIT,
    Collective,
    Event,
    Phase,
    Trace,
    TracedBlock,
)
from labkit.spmd.trace.fsdp_events import Group, groups_of, kept_bytes, observed, shard_bytes, whole_bytes


class Recording:
    """The events that `record_events` has recorded so far; `trace` returns them as a `Trace`.

    It implements `labkit.spmd.trace.fsdp_events.Observer`, whose methods are for the adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups = {group: _joined(names) for group, names in groups_of(model).items()}
        self._blocks = tuple(TracedBlock(name, whole_bytes(group), shard_bytes(group)) for group, name in self._groups.items())
        self._kept = {group: kept_bytes(group) for group in self._groups}
        self._pending: set[Group] = set()
        self._in_forward: set[Group] = set()
        self._in_backward: set[Group] = set()
        self._inside: list[str] = []
        self._resharding = False
        self._events: list[Event] = []
        self._start_s = time.monotonic()

    def trace(self) -> Trace:
        """Return the events so far. Ranks: local."""
        grouped = dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        # An event is noted when it ends, after the events inside it, so sort by beginning.
        events = tuple(sorted(self._events, key=lambda event: event.began_s))
        return Trace(rank, world_size, self._blocks, events, self._start_s)

    def collective(self, call: Collective) -> None:
        """Note a collective for the group whose unshard or reduction called it."""
        block = self._inside[-1] if self._inside else ""
        end_s = self._now()
        self._events.append(
            Event(call.kind, block, self._phase(), True, call.size_bytes, end_s - call.duration_s, call.duration_s, call.group_size)
        )

    # For the adapter --------------------------------------------------------------------------------------------------

    def unshard(self, group: Group, call: Callable[[], Any], starts: Callable[[], bool]) -> Any:
        """See `Observer`."""
        if group not in self._groups:
            return call()
        began_s, phase, changes = self._now(), self._phase(), starts()
        self._inside.append(self._groups[group])
        try:
            result = call()
        finally:
            self._inside.pop()
        now_held = kept_bytes(group)
        # An embedding can be told not to gather for backward; then an unshard is requested but does nothing.
        changes = changes and now_held > 0
        taken = now_held - self._kept[group] if changes else 0
        if changes:
            self._pending.add(group)
            self._kept[group] = now_held
        self._note(UNSHARD, group, began_s, phase, changes, taken)
        return result

    def wait(self, group: Group, call: Callable[[], Any]) -> Any:
        """See `Observer`."""
        if group not in self._groups:
            return call()
        result = call()
        # What matters is when the parameters are whole, not how long the wait took.
        changes = group in self._pending
        self._pending.discard(group)
        self._note(WAIT, group, self._now(), self._phase(), changes)
        return result

    def reshard(self, group: Group, call: Callable[[], Any]) -> Any:
        """See `Observer`."""
        if group not in self._groups or self._resharding:
            return call()
        began_s, phase = self._now(), self._phase()
        self._resharding = True
        try:
            result = call()
        finally:
            self._resharding = False
        freed = self._kept[group] - kept_bytes(group)
        self._kept[group] -= freed
        self._note(RESHARD, group, began_s, phase, freed > 0, freed)
        return result

    def reduce(self, group: Group, call: Callable[[], Any]) -> Any:
        """See `Observer`."""
        if group not in self._groups:
            return call()
        self._inside.append(self._groups[group])
        try:
            return call()
        finally:
            self._inside.pop()

    def begin(self, group: Group, phase: str, call: Callable[[], Any]) -> Any:
        """See `Observer`."""
        active = self._in_forward if phase == "forward" else self._in_backward
        if group not in self._groups or group in active:
            return call()
        active.add(group)
        result = call()
        self._note(f"{phase}_begin", group, self._now(), self._phase())
        return result

    def end(self, group: Group, phase: str, call: Callable[[], Any]) -> Any:
        """See `Observer`."""
        active = self._in_forward if phase == "forward" else self._in_backward
        if group in active:
            self._note(f"{phase}_end", group, self._now(), self._phase())
        result = call()
        active.discard(group)
        return result

    def _note(self, kind: str, group: Group, began_s: float, phase: Phase, changes: bool = True, size_bytes: int = 0) -> None:
        self._events.append(Event(kind, self._groups[group], phase, changes, size_bytes, began_s, self._now() - began_s))

    def _now(self) -> float:
        return time.monotonic() - self._start_s

    def _phase(self) -> Phase:
        if torch._C._current_graph_task_id() != -1:  # torch's own FSDP also uses this to check whether autograd is running
            return "backward"
        return "forward" if self._in_forward else "outside"


@contextmanager
def record_events(model: nn.Module) -> Iterator[Recording]:
    """Record what the runtime does with the parameters of a model on this rank while the block runs.

    Args:
        model: A module with groups of FSDP1 or FSDP2 in it; names are relative to it. Groups of other models are not recorded,
            but their collectives are.

    Returns:
        A context manager that yields a `Recording`; its ``trace()`` returns plain data.

    Raises:
        TraceError: This torch lacks functions that the tracer wraps.

    Ranks: local; adds no collective. But every rank must run the training step, even if it does not trace it.
    """
    recording = Recording(model)
    with warnings.catch_warnings():
        # Under a dispatch mode, the output of a Linear is a view, about which FSDP2 has warned since 2.13.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        with observed(recording), CollectiveMode(recording.collective):
            yield recording


def _joined(names: list[str]) -> str:
    return ", ".join(name or ROOT for name in names)
