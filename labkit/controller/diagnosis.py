"""What holds up a run, in one sentence and one small table.

The raw material is one report per rank (:class:`labkit.wire.messages.RankReport`): the line of the cell it is at, the
torch function it waits in, its CPU time, and torch's own record of its collectives. Two reports of one rank, a moment
apart, tell a rank that computes from one that waits.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from labkit.ranks import name_ranks
from labkit.wire.messages import Collective, RankReport

State = Literal["idle", "finished", "failed", "waiting", "working", "native", "silent", "dead"]
Kind = Literal[
    "idle",
    "working",
    "straggler",
    "missing rank",
    "different collectives",
    "different shapes",
    "different order",
    "different groups",
    "same collective",
    "dead rank",
    "native code",
    "no answer",
]

# A rank that used less of the time between two reports than this waits; gloo's waiting threads use almost nothing.
WORKING_SHARE = 0.3
# What gloo's record calls a collective differs from what the user called.
_SAME_IN_RECORD = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
}


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank does, judged.

    Attributes:
        rank: The rank.
        state: ``idle`` (not part of the run), ``finished`` or ``failed``, ``waiting`` in a collective, ``working``, in ``native``
            code that neither computes nor is a known collective, ``silent`` (no answer), or ``dead``.
        report: Its report, None when it gave none.
        collective: What it waits in, as torch recorded it.
    """

    rank: int
    state: State
    report: RankReport | None = None
    collective: Collective | None = None

    @property
    def call(self) -> str:
        """The collective's name as the reader's code calls it, with its number: ``all_reduce #5``."""
        name = (self.report.waits_in if self.report else "") or (self.collective.name if self.collective else "a collective")
        name = _public_name(name, self.collective)
        return f"{name} #{self.collective.sequence}" if self.collective else name

    @property
    def place(self) -> str:
        """``line 5`` of the cell, or what is known instead."""
        return self.report.where if self.report and self.report.where else "an unknown line"


def _public_name(name: str, collective: Collective | None) -> str:
    if name in ("synchronize", "wait", "wait_stream") and collective is not None:
        return _SAME_IN_RECORD.get(collective.name, collective.name)
    return {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}.get(name, name)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What holds up a run.

    Attributes:
        kind: The kind of hold-up.
        verdict: One or two sentences for people.
        states: What each rank does.
        hangs: Waiting longer cannot help.
    """

    kind: Kind
    verdict: str
    states: tuple[RankState, ...] = field(default=())
    hangs: bool = False

    def __str__(self) -> str:
        rows = [(str(state.rank), *_cells(state)) for state in self.states]
        head = ("rank", "state", "where", "waits in", "code")
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(4)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)) + "  " + row[4] for row in [head, *rows]
        ]
        return "\n".join([self.verdict, *(line.rstrip() for line in lines)])

    def _repr_html_(self) -> str:
        style = "text-align:left;padding:2px 12px 2px 0;vertical-align:top"
        head = "".join(f'<th style="{style}">{text}</th>' for text in ("rank", "state", "where", "waits in", "code"))
        rows = "".join(
            "<tr>"
            + "".join(f'<td style="{style}">{html.escape(text)}</td>' for text in (str(state.rank), *_cells(state)[:3]))
            + f'<td style="{style};font-family:monospace">{html.escape(_cells(state)[3])}</td></tr>'
            for state in self.states
        )
        return f"<p><b>{html.escape(self.verdict)}</b></p><table><tr>{head}</tr>{rows}</table>"


def _cells(state: RankState) -> tuple[str, str, str, str]:
    report = state.report
    if report is None or state.state in ("idle", "finished", "failed", "dead"):
        return state.state, "", "", ""
    waits = state.call if state.state == "waiting" else ""
    if waits and state.collective is not None and state.collective.sizes:
        waits += " " + _sizes(state.collective)
    return state.state, report.where, waits, report.code


def _sizes(collective: Collective) -> str:
    return ", ".join(str(list(shape)) for shape in collective.sizes)


def judge(
    ranks: Iterable[int],
    all_ranks: Iterable[int],
    finished: Iterable[int],
    failed: Iterable[int],
    dead: Iterable[int],
    before: Mapping[int, RankReport],
    now: Mapping[int, RankReport],
    apart_s: float,
) -> Diagnosis:
    """Judge what holds up a run.

    Args:
        ranks: The ranks that the run was sent to.
        all_ranks: All ranks of the pool.
        finished: Those that have ended it well.
        failed: Those that have ended it badly.
        dead: Ranks whose process is gone.
        before: Earlier reports, which may be empty.
        now: Present reports; a rank without one did not answer.
        apart_s: Seconds between the two.

    Returns:
        The diagnosis.
    """
    ended: dict[int, State] = dict.fromkeys(set(all_ranks) - set(ranks), "idle")
    ended |= dict.fromkeys(finished, "finished")
    ended |= dict.fromkeys(failed, "failed")
    ended |= dict.fromkeys(dead, "dead")
    states = tuple(
        RankState(rank, ended[rank], now.get(rank)) if rank in ended else _state(rank, before.get(rank), now.get(rank), apart_s)
        for rank in sorted(all_ranks)
    )
    kind, verdict, hangs = _verdict(states)
    return Diagnosis(kind, verdict, states, hangs)


def _state(rank: int, before: RankReport | None, now: RankReport | None, apart_s: float) -> RankState:
    if now is None:
        return RankState(rank, "silent")
    if now.run_id is None:
        return RankState(rank, "finished", now)
    open_ones = [collective for collective in now.collectives if not collective.done]
    earlier = before.collectives if before is not None and before.innermost == now.innermost else None
    # A thread that waits for a GPU may spin, so its CPU time says nothing; an unfinished collective does.
    if now.in_collective and (open_ones or not _computes(before, now, apart_s)):
        return RankState(rank, "waiting", now, open_ones[-1] if open_ones else None)
    if earlier and open_ones and open_ones[-1] in earlier:
        return RankState(rank, "waiting", now, open_ones[-1])
    if earlier is not None and not _computes(before, now, apart_s):
        return RankState(rank, "native", now)
    return RankState(rank, "working", now)


def _computes(before: RankReport | None, now: RankReport, apart_s: float) -> bool:
    return before is not None and apart_s > 0 and now.cpu_s - before.cpu_s > WORKING_SHARE * apart_s


def _verdict(states: tuple[RankState, ...]) -> tuple[Kind, str, bool]:
    waiting = [state for state in states if state.state == "waiting"]
    dead = [state for state in states if state.state == "dead"]
    silent = [state for state in states if state.state == "silent"]
    working = [state for state in states if state.state in ("working", "native")]
    if dead and waiting:
        return "dead rank", f"{_who(dead)} died; {_wait_clause(waiting)} for it.", True
    if waiting:
        return _verdict_on_waiting(states, waiting)
    if silent:
        return (
            "no answer",
            f"{_who(silent)} did not answer: native code there holds Python's lock, or the process is stopped.",
            False,
        )
    if not working:
        return "idle", "No run is in progress; all ranks are idle.", False
    native = [state for state in working if state.state == "native"]
    if native and len(native) == len(working):
        where = _places(native)
        return (
            "native code",
            f"{_who(native)} {_is(native)} at {where}, outside collectives, and not computing (it sleeps or waits).",
            False,
        )
    return "working", f"{_who(working)} {_is(working)} computing at {_places(working)}.", False


def _verdict_on_waiting(states: tuple[RankState, ...], waiting: list[RankState]) -> tuple[Kind, str, bool]:
    groups = {state.collective.group for state in waiting if state.collective is not None}
    if len(groups) > 1:
        return "different groups", f"The ranks wait in different process groups: {_each(waiting)}.", True
    missing = _missing(states, waiting)
    absent = [state for state in missing if state.state in ("finished", "failed", "idle")]
    busy = [state for state in missing if state.state in ("working", "native", "silent")]
    names = {_record_name(state) for state in waiting}
    numbers = {state.collective.sequence for state in waiting if state.collective is not None}
    if len(names) > 1:
        return "different collectives", f"The ranks called different collectives: {_each(waiting)}.", True
    if len(numbers) > 1:
        return (
            "different order",
            f"The ranks are at different collectives of one group: {_each(waiting)}. One rank made a call that another skipped.",
            True,
        )
    if absent:
        verb = {"finished": "finished the cell", "failed": "failed", "idle": f"{_is(absent)} not part of this run"}[absent[0].state]
        return "missing rank", f"{_who(absent)} {verb}; {_wait_clause(waiting)} for {_them(absent)}.", True
    if busy:
        doing = "still computing" if any(state.state == "working" for state in busy) else "still busy"
        return (
            "straggler",
            f"{_who(busy)} {_is(busy)} {doing} at {_places(busy)}; {_wait_clause(waiting)} for {_them(busy)}.",
            False,
        )
    if len({state.collective.sizes for state in waiting if state.collective is not None}) > 1:
        shapes = ", ".join(
            f"rank {state.rank} sends {_sizes(state.collective)}" for state in waiting if state.collective is not None
        )
        return "different shapes", f"The ranks called {waiting[0].call} with different shapes: {shapes}.", True
    return "same collective", f"{_who(waiting)} {_is(waiting)} all in {waiting[0].call} at {_places(waiting)}.", False


def _record_name(state: RankState) -> str:
    name = _public_name(state.report.waits_in if state.report else "", state.collective)
    return _SAME_IN_RECORD.get(name, name)


def _missing(states: tuple[RankState, ...], waiting: list[RankState]) -> list[RankState]:
    """Members of the waiting ranks' group that are not in the collective."""
    member_sets = [
        set(state.report.groups[state.collective.group])
        for state in waiting
        if state.report is not None and state.collective is not None and state.collective.group in state.report.groups
    ]
    members = set.intersection(*member_sets) if member_sets else {state.rank for state in states}
    present = {state.rank for state in waiting}
    return [state for state in states if state.rank in members and state.rank not in present and state.state != "dead"]


def _wait_clause(waiting: list[RankState]) -> str:
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{_who(waiting)} {verb} in {waiting[0].call} at {_places(waiting)}"


def _each(states: list[RankState]) -> str:
    parts: dict[str, list[int]] = {}
    for state in states:
        parts.setdefault(f"in {state.call} at {state.place}", []).append(state.rank)
    return "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in parts.items())


def _places(states: list[RankState]) -> str:
    places = list(dict.fromkeys(state.place for state in states))
    return " and ".join(places) if len(places) <= 2 else f"{places[0]} and {len(places) - 1} other places"


def _who(states: list[RankState]) -> str:
    return name_ranks(state.rank for state in states)


def _is(states: list[RankState]) -> str:
    return "is" if len(states) == 1 else "are"


def _them(states: list[RankState]) -> str:
    return "it" if len(states) == 1 else "them"
