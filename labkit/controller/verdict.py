"""The judgement over a run that waits: from one report per rank to one sentence.

Ranks that wait are victims. The cause is looked for among those that they wait for: members of their group that are not
in the collective. A rank that computes may still come, so with one of those about nothing is called a hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from labkit.controller.diagnosis import Diagnosis, Kind, RankState, State, recorded, sizes_of
from labkit.ranks import name_ranks
from labkit.wire.messages import Collective, RankReport

# A rank that used less of the time between two reports than this waits; gloo's waiting threads use almost nothing.
WORKING_SHARE = 0.05
# Two reports nearer than this tell nothing: making one takes milliseconds of processor time itself.
APART_S = 0.4
# Torch's name for the default group. labkit completes a collective on it whenever it forms groups.
DEFAULT_GROUP = "0"
# Every rank puts the same shape into these. Into others, such as all_to_all_single, it may not.
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
    stuck = _stuck([collective for collective in now.collectives if not collective.done])
    earlier = before.collectives if before is not None and before.innermost == now.innermost else None
    # A thread that waits for a GPU may spin, so its CPU time says nothing; an unfinished collective does.
    if now.in_collective and (stuck or not _computes(before, now, apart_s)):
        return RankState(rank, "waiting", now, stuck)
    if earlier and stuck in earlier:
        return RankState(rank, "waiting", now, stuck)
    if earlier is not None and not _computes(before, now, apart_s):
        return RankState(rank, "native", now)
    return RankState(rank, "working", now)


def _stuck(open_ones: Sequence[Collective]) -> Collective | None:
    """The collective that does not end, of those that have not ended.

    On a GPU the first one: the others are queued behind it. With gloo the last one, which is the one that the rank has called.
    """
    queued = [collective for collective in open_ones if collective.backend == "nccl"]
    return queued[0] if queued else open_ones[-1] if open_ones else None


def _computes(before: RankReport | None, now: RankReport, apart_s: float) -> bool:
    return before is not None and apart_s > APART_S and now.cpu_s - before.cpu_s > WORKING_SHARE * apart_s


def _verdict(states: tuple[RankState, ...]) -> tuple[Kind, str, bool]:
    waiting = [state for state in states if state.state == "waiting"]
    dead = [state for state in states if state.state == "dead"]
    silent = [state for state in states if state.state == "silent"]
    working = [state for state in states if state.state in ("working", "native")]
    if dead and waiting:
        return "dead rank", f"{_who(dead)} died; {_wait_clause(waiting)} for {_them(dead)}.", True
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
    if mismatch := _mismatch(states, waiting):
        return mismatch
    awaited = _awaited(states, waiting)
    busy = [state for state in awaited if state.state in ("working", "native", "silent")]
    absent = [state for state in awaited if state.state in ("finished", "failed", "idle")]
    groups = {state.collective.group for state in waiting if state.collective is not None}
    numbers = {state.collective.sequence for state in waiting if state.collective is not None}
    if len(groups) == 1 and not busy:
        if len({state.recorded_name for state in waiting}) > 1:
            return "different collectives", f"The ranks called different collectives: {_each(waiting)}.", True
        if len(numbers) > 1:
            places = f"The ranks are at different collectives of one group: {_each(waiting)}."
            return "different order", f"{places} One rank made a call that another skipped.", True
    if absent:
        victims = [state for state in waiting if _waits_for(state, absent)]
        verb = {"finished": "finished the cell", "failed": "failed", "idle": f"{_is(absent)} not part of this run"}[absent[0].state]
        return "missing rank", f"{_who(absent)} {verb}; {_wait_clause(victims)} for {_them(absent)}.", True
    if busy:
        victims = [state for state in waiting if _waits_for(state, busy)]
        doing = "still computing" if any(state.state == "working" for state in busy) else "still busy"
        return (
            "straggler",
            f"{_who(busy)} {_is(busy)} {doing} at {_places(busy)}; {_wait_clause(victims)} for {_them(busy)}.",
            False,
        )
    if len(groups) > 1:
        return "different groups", f"The ranks wait in different process groups: {_each(waiting)}.", True
    return "same collective", f"{_who(waiting)} {_is(waiting)} all in {waiting[0].call} at {_places(waiting)}.", False


def _mismatch(states: tuple[RankState, ...], waiting: list[RankState]) -> tuple[Kind, str, bool] | None:
    """Whether a rank made another call, or one with another shape, under the number of a call in which others wait.

    It need not wait itself: a small message is sent, and its sender goes on.
    """
    for victim in waiting:
        mine = victim.collective
        if mine is None or _is_point_to_point(mine):
            continue
        theirs = {state.rank: found for state in states if (found := _same_number(state, mine)) is not None}
        gone = {rank: found for rank, found in theirs.items() if found.done}
        names = {recorded(found.name) for found in theirs.values()}
        if len(names) > 1:
            left = _parts({rank: f"called {found.name} #{found.sequence} and went on" for rank, found in gone.items()})
            return "different collectives", f"The ranks called different collectives: {'; '.join([_each(waiting), *left])}.", True
        if names <= set(_EQUAL_SHAPES) and len({found.sizes for found in theirs.values()}) > 1:
            shapes = _parts(
                {rank: f"{sizes_of(found)}{' and went on' if found.done else ''}" for rank, found in theirs.items()}, "sent"
            )
            return "different shapes", f"The ranks called {victim.call} with different shapes: {', '.join(shapes)}.", True
    return None


def _same_number(state: RankState, mine: Collective) -> Collective | None:
    """The collective that a rank called under the number of ``mine`` in the same group, as far as it is known."""
    if state.state == "dead" or state.report is None:
        return None
    for other in reversed(state.report.collectives):
        if other.backend != mine.backend or _is_point_to_point(other):
            continue
        if (other.group, other.sequence) == (mine.group, mine.sequence):
            return other
        if (other.group, other.sequence) == (DEFAULT_GROUP, 1):
            return None  # the groups were formed here; what was before has numbers of its own
    return None


def _is_point_to_point(collective: Collective) -> bool:
    return collective.name.startswith(("send", "recv"))


def _awaited(states: tuple[RankState, ...], waiting: list[RankState]) -> list[RankState]:
    """Ranks that wait for nobody and that a waiting rank needs."""
    others = [state for state in states if state.state not in ("waiting", "dead")]
    return [state for state in others if any(_waits_for(victim, [state]) for victim in waiting)]


def _waits_for(victim: RankState, others: list[RankState]) -> bool:
    """Whether one of these ranks belongs to the collective that the victim is in and has not been there."""
    mine = victim.collective
    members = victim.report.groups.get(mine.group) if victim.report is not None and mine is not None else None
    return any(
        (members is None or other.rank in members) and (mine is None or _same_number(other, mine) is None) for other in others
    )


def _wait_clause(waiting: list[RankState]) -> str:
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{_who(waiting)} {verb} in {waiting[0].call} at {_places(waiting)}"


def _each(states: list[RankState]) -> str:
    return "; ".join(_parts({state.rank: f"in {state.call} at {state.place}" for state in states}))


def _parts(texts: Mapping[int, str], verb: str = "") -> list[str]:
    """One part for each different text, with its ranks in front."""
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
