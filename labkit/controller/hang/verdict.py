"""The judgement of a run that waits: from one report per rank to one sentence.

Ranks that wait are victims. The cause is sought among the ranks they wait for: members of their group that are not in the
collective. A rank that computes may still come, so while there is one, nothing is called a hang.

Reports of several ranks never come from the same moment, and ranks of a correct program are seldom at the same call. So there are
two kinds of proof, and without one the verdict only says where the ranks are:

* torch's record of one group. Every rank has to make the same call under the same number. A rank that has ended the run without
  reaching a number will never make that call.
* Two looks, at least APART_S apart, between which a waiting rank has begun nothing and has not computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from labkit.base.plain_text import name_ranks
from labkit.controller.hang.diagnosis import Diagnosis, Kind, RankState, State, recorded, sizes_of
from labkit.controller.hang.proof import is_in, is_point_to_point, members, needs, same_number
from labkit.wire.messages import RankReport, RecordedCollective

# A rank that used a smaller share of the time between two reports is waiting; gloo's waiting threads use almost nothing.
WORKING_SHARE = 0.05
# A rank in a collective may process arriving data, which takes some CPU time; a rank that really receives uses much more.
RECEIVING_SHARE = 0.25
# Two reports closer than this prove nothing: ranks share processors, and making a report itself takes milliseconds.
APART_S = 0.5
# Torch's name for the default group.
DEFAULT_GROUP = "0"
# Every rank passes the same shape to these. To others, such as all_to_all_single, it need not.
_EQUAL_SHAPES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


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
        finished: The ranks that have ended it well.
        failed: The ranks that have ended it badly.
        dead: Ranks whose process has ended.
        before: Earlier reports, which may be empty.
        now: Present reports; a rank without one did not answer.
        apart_s: Seconds between the two.

    Returns:
        The diagnosis.
    """
    if apart_s < APART_S:
        before = {}
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
    stuck = _stuck([collective for collective in now.collectives if not collective.done])
    used = (now.cpu_s - before.cpu_s) / apart_s if before is not None else 0.0
    computes = used > (RECEIVING_SHARE if now.in_collective else WORKING_SHARE)
    # A thread that waits for a GPU may spin, so its CPU time shows nothing; an unfinished collective does.
    spins = stuck is not None and stuck.backend == "nccl"
    same_place = before is not None and (before.run_id, before.innermost) == (now.run_id, now.innermost)
    rests = same_place and before is not None and before.begun == now.begun and (spins or not computes)
    if now.in_collective and (stuck or not computes):
        return RankState(rank, "waiting", now, stuck, stalled=rests)
    if rests and stuck and before is not None and stuck in before.collectives:
        return RankState(rank, "waiting", now, stuck, stalled=True)
    return RankState(rank, "native" if rests else "working", now)


def _stuck(open_ones: Sequence[RecordedCollective]) -> RecordedCollective | None:
    """Return the collective that blocks a rank, among those that have not ended.

    On a GPU this is the first one: the others are queued behind it. With gloo it is the last one, the one the rank has called.
    """
    queued = [collective for collective in open_ones if collective.backend == "nccl"]
    return queued[0] if queued else open_ones[-1] if open_ones else None


def _verdict(states: tuple[RankState, ...]) -> tuple[Kind, str, bool]:
    waiting = [state for state in states if state.state == "waiting"]
    dead = [state for state in states if state.state == "dead"]
    silent = [state for state in states if state.state == "silent"]
    working = [state for state in states if state.state in ("working", "native")]
    if dead and waiting:
        return "dead rank", f"{_who(dead)} died; {_wait_clauses(waiting)} for {_them(dead)}.", True
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
        sleep = "sleeps or waits" if len(native) == 1 else "sleep or wait"
        return "native code", f"{_who(native)} {_is(native)} at {_places(native)}, outside collectives, and {sleep} there.", False
    return "working", f"{_who(working)} {_is(working)} computing at {_places(working)}.", False


def _verdict_on_waiting(states: tuple[RankState, ...], waiting: list[RankState]) -> tuple[Kind, str, bool]:
    if proven := _mismatch(states, waiting) or _missing(states, waiting):
        return proven
    stalled = [state for state in waiting if state.stalled]
    may_come = [state for state in states if state.state in ("working", "native", "silent", "waiting") and not state.stalled]
    # A rank that waits itself is not a straggler: it may be about to stall, or may need long for what it receives.
    at_work = [state for state in may_come if state.state != "waiting"]
    if busy := [state for state in at_work if any(needs(victim, state) for victim in stalled)]:
        victims = [state for state in stalled if any(needs(state, other) for other in busy)]
        doing = "still computing" if any(state.state == "working" for state in busy) else "still busy"
        return (
            "straggler",
            f"{_who(busy)} {_is(busy)} {doing} at {_places(busy)}; {_wait_clauses(victims)} for {_them(busy)}.",
            False,
        )
    if stalled and not may_come and (found := _deadlock(states, stalled)):
        return found
    first = waiting[0].collective
    together = members(states, waiting[0])
    present = [state for state in states if state.state in ("waiting", "working", "native", "silent")]
    if first is not None and present == together and all(state.state == "waiting" and is_in(state, first) for state in together):
        return "same collective", f"{_who(waiting)} {_is(waiting)} all in {waiting[0].call} at {_places(waiting)}.", False
    return "running", f"{'; '.join(_parts({state.rank: _doing(state) for state in states}))}.", False


def _deadlock(states: tuple[RankState, ...], stalled: list[RankState]) -> tuple[Kind, str, bool] | None:
    """Explain a wait in which no rank computes, and no rank has ended without a call that another waits for."""
    called = [state.collective for state in stalled if state.collective is not None]
    if len(called) < len(stalled):
        return "each other", f"The ranks wait for each other: {_each(stalled)}.", True
    if len({mine.group for mine in called}) > 1:
        parts = _parts({state.rank: _doing(state, _group_of(state)) for state in stalled})
        return "different groups", f"The ranks wait in different process groups: {'; '.join(parts)}.", True
    if len({mine.sequence for mine in called}) > 1:
        return "different numbers", f"The ranks are at different collectives of one group: {_each(stalled)}.", True
    if len({state.partner for state in stalled}) > 1:
        role = "destinations" if called[0].name in ("reduce", "gather") else "sources"
        return "different sources", f"The ranks called {stalled[0].call} with different {role}: {_each(stalled)}.", True
    if gone := [state for state in members(states, stalled[0]) if state.state != "waiting"]:
        rule = " Every rank has to name the same source." if stalled[0].partner is not None else ""
        left = f"{_each(stalled)} {_is(stalled)} left behind; {_who(gone)} made the same call and went on.{rule}"
        return "left behind", left, True
    return None


def _mismatch(states: tuple[RankState, ...], waiting: list[RankState]) -> tuple[Kind, str, bool] | None:
    """Report a rank that made another call, or one with another shape, under the number of a call in which others wait.

    That rank need not wait itself: if it only sends a small message, it goes on.
    """
    for victim in waiting:
        mine = victim.collective
        if mine is None or is_point_to_point(mine):
            continue
        theirs = {state.rank: found for state in states if (found := same_number(state, victim, mine)) is not None}
        gone = {rank: found for rank, found in theirs.items() if found.done}
        names = {recorded(found.name) for found in theirs.values()}
        if len(names) > 1:
            there = [state for state in waiting if state.rank in theirs and state.rank not in gone]
            told = {state.rank: f"in {state.call} at {state.place}" for state in there}
            told |= {rank: f"called {found.name} #{found.sequence} and went on" for rank, found in gone.items()}
            return "different collectives", f"The ranks called different collectives: {'; '.join(_parts(told))}.", True
        if names <= set(_EQUAL_SHAPES) and len({_num_elements(found) for found in theirs.values()}) > 1:
            shapes = _parts(
                {rank: f"{sizes_of(found)}{' and went on' if found.done else ''}" for rank, found in theirs.items()}, "sent"
            )
            return "different shapes", f"The ranks called {victim.call} with different shapes: {', '.join(shapes)}.", True
    return None


def _num_elements(collective: RecordedCollective) -> int:
    return sum(math.prod(shape) for shape in collective.sizes)


def _missing(states: tuple[RankState, ...], waiting: list[RankState]) -> tuple[Kind, str, bool] | None:
    """Report ranks that have ended the run while others wait for them. If one of them failed, it is the cause."""
    verbs = {"failed": "failed", "idle": "{} not part of this run", "finished": "finished the cell"}
    for kind, verb in verbs.items():
        absent = [state for state in states if state.state == kind and any(needs(victim, state) for victim in waiting)]
        if absent:
            victims = [state for state in waiting if any(needs(state, other) for other in absent)]
            ended = verb.format(_is(absent))
            return "missing rank", f"{_who(absent)} {ended}; {_wait_clauses(victims)} for {_them(absent)}.", True
    return None


def _group_of(state: RankState) -> str:
    name = state.collective.group if state.collective is not None else ""
    ranks = state.report.groups.get(name) if state.report is not None else None
    return " of the default group" if name == DEFAULT_GROUP else f" of a group of {name_ranks(ranks)}" if ranks else ""


def _wait_clauses(waiting: list[RankState]) -> str:
    """Return ``ranks 0-1 wait in all_reduce #5 at line 3``, one clause for each different call."""
    calls: dict[str, list[RankState]] = {}
    for state in waiting:
        calls.setdefault(state.call, []).append(state)
    clauses = [
        f"{_who(states)} {'waits' if len(states) == 1 else 'wait'} in {call} at {_places(states)}" for call, states in calls.items()
    ]
    return " and ".join(clauses)


def _each(states: list[RankState]) -> str:
    return "; ".join(_parts({state.rank: _doing(state) for state in states}))


def _doing(state: RankState, of: str = "") -> str:
    if state.state == "waiting":
        return f"in {state.call_with_partner}{of} at {state.place}"
    if state.state in ("working", "native"):
        return f"{'computing' if state.state == 'working' else 'busy'} at {state.place}"
    return {"silent": "without an answer", "finished": "done", "idle": "not part of the run"}.get(state.state, state.state)


def _parts(texts: Mapping[int, str], verb: str = "") -> list[str]:
    """Return one part for each different text, with its ranks in front."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return [" ".join(filter(None, (name_ranks(found), verb, text))) for text, found in ranks.items()]


def _places(states: list[RankState]) -> str:
    places = list(dict.fromkeys(state.place for state in states))
    return " and ".join(places) if len(places) <= 2 else f"{places[0]} and {len(places) - 1} other places"


def _who(states: list[RankState]) -> str:
    return name_ranks(state.rank for state in states)


def _is(states: list[RankState]) -> str:
    return "is" if len(states) == 1 else "are"


def _them(states: list[RankState]) -> str:
    return "it" if len(states) == 1 else "them"
