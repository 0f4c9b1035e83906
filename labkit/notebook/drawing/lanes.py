"""Conversion of a trace into the elements of a timeline: bars, marks, phases and levels of one lane. No drawing here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from labkit.spmd.trace import events as ev

if TYPE_CHECKING:
    from labkit.spmd.trace.events import Event, Trace

GATHER_MARK = ev.ALL_GATHER
# The marker and whether it is filled: the kinds differ in shape and not in colour.
MARKS = {ev.ALL_GATHER: (">", True), ev.REDUCE_SCATTER: ("<", False), ev.ALL_REDUCE: ("D", False), "broadcast": ("s", False)}
_COMPUTE = {
    ev.FORWARD_BEGIN: (ev.FORWARD_END, "forward"),
    ev.BACKWARD_BEGIN: (ev.BACKWARD_END, "backward"),
}
NO_BLOCK = "no block"


@dataclass
class Period:
    """A period in which a block's parameters are gathered or being gathered.

    Attributes:
        block: The block.
        phase: The phase in which it began.
        begin: The x where the gather began, or the left edge.
        end: The x where the parameters were freed, or the right edge.
        whole: The x where the wait for the gather ended; None if nothing waited.
        size_bytes: The memory that it keeps alive.
        open_left: Whether the parameters were gathered before the trace began.
        open_right: Whether they are still gathered at the end.
        computes: Begin and end of the block's own forward and backward within the period.
    """

    block: str
    phase: str
    begin: float
    end: float
    whole: float | None = None
    size_bytes: int = 0
    open_left: bool = False
    open_right: bool = False
    computes: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    """A collective of a block."""

    block: str
    kind: str
    x: float


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of the step."""

    name: str
    begin: float
    end: float


@dataclass
class Lane:
    """One trace on the drawing's axis.

    Attributes:
        label: The text at its left.
        rank: The rank, which decides its colour.
        rows: The blocks, from top to bottom.
        short_names: The blocks' names at the left.
        periods: The bars.
        marks: The collectives.
        phases: Forward and backward.
        xs: The positions where the live bytes change.
        levels: The live bytes from each position on.
        end: The right edge.
        most_whole: The largest number of blocks that are gathered or being gathered at the same time.
    """

    label: str
    rank: int
    rows: tuple[str, ...]
    short_names: tuple[str, ...]
    periods: list[Period]
    marks: list[Mark]
    phases: list[PhaseSpan]
    xs: list[float]
    levels: list[int]
    end: float
    most_whole: int


def lanes_of(traces: Mapping[int, Trace] | Mapping[str, Trace], by: str) -> list[Lane]:
    """Return one lane per trace, on a common axis: one step per event, or milliseconds from the earliest event on."""
    shown = {
        key: [(event, level) for event, level in zip(t.events, t.live_bytes(), strict=True) if _is_shown(event)]
        for key, t in traces.items()
    }
    starts = [traces[key].start_s + pairs[0][0].began_s for key, pairs in shown.items() if pairs]  # type: ignore[index]
    zero = min(starts, default=0.0)
    lanes = []
    for key, trace in traces.items():
        pairs = shown[key]
        if by == "time":
            xs = [(trace.start_s + event.began_s - zero) * 1000 for event, _ in pairs]
        else:
            xs = _steps([event for event, _ in pairs])
        lanes.append(_lane(f"rank {key}" if isinstance(key, int) else key, trace, pairs, xs, by))
    return lanes


def _is_shown(event: Event) -> bool:
    return event.changes and (not event.group_size or event.kind in MARKS)


def _steps(events: list[Event]) -> list[float]:
    """Return one step per event. A gather is drawn at its unshard, and a wait takes no step of its own."""
    xs, x = [], 0.0
    for event in events:
        joins = event.kind in (ev.WAIT, ev.FORWARD_BEGIN, ev.BACKWARD_BEGIN) or (event.kind == ev.ALL_GATHER and event.block)
        xs.append(x if not joins else max(x - 1, 0.0) + 0.5 * (event.kind != ev.ALL_GATHER))
        x += 0 if joins else 1
    return xs


def _lane(label: str, trace: Trace, pairs: list[tuple[Event, int]], xs: list[float], by: str) -> Lane:
    last = xs[-1] if xs else 0.0
    if by == "time" and pairs:
        last += pairs[-1][0].duration_s * 1000
    end = last + (1.0 if by == "order" else max(last * 0.01, 0.01))
    names = [block.name for block in trace.blocks]
    events = [event for event, _ in pairs]
    if any(event.group_size and event.block not in names for event in events):
        names.append(NO_BLOCK)
    periods = _periods(events, xs, end)
    marks = [
        Mark(event.block if event.block in names else NO_BLOCK, event.kind, x)
        for event, x in zip(events, xs, strict=True)
        if event.group_size
    ]
    return Lane(
        label,
        trace.rank,
        tuple(names),
        tuple(ev.short_name(name) for name in names),
        periods,
        marks,
        _phases(events, xs, end),
        [0.0, *xs, end],
        [_level_before(pairs), *(level for _, level in pairs), pairs[-1][1] if pairs else 0],
        end,
        _most_at_once(periods),
    )


def _level_before(pairs: list[tuple[Event, int]]) -> int:
    if not pairs:
        return 0
    event, level = pairs[0]
    return level - event.size_bytes if event.kind == ev.UNSHARD else level + event.size_bytes * (event.kind == ev.RESHARD)


def _periods(events: list[Event], xs: list[float], end: float) -> list[Period]:
    finished: list[Period] = []
    open_: dict[str, Period] = {}
    running: dict[tuple[str, str], float] = {}
    for event, x in zip(events, xs, strict=True):
        if event.kind == ev.UNSHARD:
            open_[event.block] = Period(event.block, event.phase, x, end, size_bytes=event.size_bytes)
        elif event.kind == ev.WAIT and event.block in open_:
            open_[event.block].whole = x
        elif event.kind == ev.RESHARD:
            period = open_.pop(event.block, None) or Period(
                event.block, "before", 0.0, x, size_bytes=event.size_bytes, open_left=True
            )
            period.end = x
            finished.append(period)
        elif event.kind in _COMPUTE:
            running[event.block, _COMPUTE[event.kind][0]] = x
        elif (event.block, event.kind) in running and event.block in open_:
            open_[event.block].computes.append((running.pop((event.block, event.kind)), x))
    for period in open_.values():
        period.open_right = True
        finished.append(period)
    return sorted(finished, key=lambda period: period.begin)


def _phases(events: list[Event], xs: list[float], end: float) -> list[PhaseSpan]:
    spans: list[PhaseSpan] = []
    for event, x in zip(events, xs, strict=True):
        if not spans or spans[-1].name != event.phase:
            if spans:
                spans[-1] = PhaseSpan(spans[-1].name, spans[-1].begin, x)
            spans.append(PhaseSpan(event.phase, x if spans else 0.0, end))
    return spans


def _most_at_once(periods: list[Period]) -> int:
    steps = sorted([(period.begin, 1) for period in periods] + [(period.end, -1) for period in periods])
    most = now = 0
    for _, change in steps:
        now += change
        most = max(most, now)
    return most
