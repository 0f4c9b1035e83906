"""A diagnosis of the cause that holds up a run, in one sentence and one small table.

The raw material is one report per rank (:class:`labkit.wire.messages.RankReport`): the line of the cell it is at, the torch
function it waits in, its CPU time, and torch's own record of its collectives. Two reports of one rank, a moment apart, distinguish
a rank that computes from one that waits.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Literal

from labkit.wire.messages import RankReport, RecordedCollective

State = Literal["idle", "finished", "failed", "waiting", "working", "native", "silent", "dead"]
Kind = Literal[
    "idle",
    "working",
    "straggler",
    "missing rank",
    "different collectives",
    "different shapes",
    "different numbers",
    "different sources",
    "different groups",
    "each other",
    "left behind",
    "running",
    "same collective",
    "dead rank",
    "native code",
    "no answer",
]

# gloo's record uses other names for some collectives than the user's code.
_SAME_IN_RECORD = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
}


_FOR_THE_DEVICE = ("synchronize", "wait_stream")


@dataclass(frozen=True, slots=True)
class RankState:
    """The activity of one rank, judged from its reports.

    Attributes:
        rank: The rank.
        state: ``idle`` (not part of the run), ``finished`` or ``failed``, ``waiting`` in a collective, ``working``, in ``native``
            code that neither computes nor is a known collective, ``silent`` (no answer), or ``dead``.
        report: Its report, None when it gave none.
        collective: The collective it waits in, as torch recorded it.
        stalled: Whether it was waiting there at an earlier look too and has begun nothing since.
    """

    rank: int
    state: State
    report: RankReport | None = None
    collective: RecordedCollective | None = None
    stalled: bool = False

    @property
    def call(self) -> str:
        """The collective's name as the reader's code calls it, with its number: ``all_reduce #5``."""
        name = (self.report.waits_in if self.report else "") or (self.collective.name if self.collective else "a collective")
        name = _public_name(name, self.collective)
        return f"{name} #{self.collective.sequence}" if self.collective else name

    @property
    def partner(self) -> int | None:
        """The rank that the call names as its source or destination."""
        return self.report.partner if self.report is not None else None

    @property
    def call_with_partner(self) -> str:
        """The call with the rank that it names: ``recv from rank 1``, ``broadcast #2 with source 1``."""
        if self.partner is None:
            return self.call
        name = self.report.waits_in if self.report is not None else ""
        if name.startswith(("send", "recv", "isend", "irecv")):
            return f"{self.call} {'to' if 'send' in name else 'from'} rank {self.partner}"
        return f"{self.call} with {'destination' if name.startswith(('reduce', 'gather')) else 'source'} {self.partner}"

    @property
    def place(self) -> str:
        """``line 5`` of the cell, or a phrase if the line is not known."""
        return self.line[0] or "an unknown line"

    @property
    def has_place(self) -> bool:
        """True if a line is known."""
        return bool(self.line[0])

    @property
    def line(self) -> tuple[str, str]:
        """The line's location and its text, both empty if no line is known."""
        report, called = self.report, self.collective
        if report is None:
            return "", ""
        # A GPU's collectives only join its queue: the rank goes on and waits later, in another line or after the last one.
        if called is not None and called.where and report.waits_in in ("", *_FOR_THE_DEVICE):
            return called.where, called.code
        return report.where, report.code


def recorded(name: str) -> str:
    """Return the name under which torch records a collective."""
    return _SAME_IN_RECORD.get(name, name)


def _public_name(name: str, collective: RecordedCollective | None) -> str:
    if name in ("wait", *_FOR_THE_DEVICE) and collective is not None:
        return recorded(collective.name)
    return {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}.get(name, name)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause that holds up a run.

    Attributes:
        kind: The kind of hold-up.
        verdict: One or two sentences for people.
        states: The state of each rank.
        hangs: Whether waiting longer cannot help.
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
        waits += f", {'shape' if len(state.collective.sizes) == 1 else 'shapes'} {sizes_of(state.collective)}"
    where, code = state.line
    return state.state, where, waits, code


def sizes_of(collective: RecordedCollective) -> str:
    """Return the shapes that a rank passes to a collective."""
    return ", ".join(str(list(shape)) for shape in collective.sizes)
