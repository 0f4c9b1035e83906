"""Conclusions from the ranks' reports about one call: which ranks belong to it, have made it, or are waited for."""

from __future__ import annotations

from labkit.controller.hang.diagnosis import RankState
from labkit.wire.messages import RecordedCollective


def needs(victim: RankState, other: RankState) -> bool:
    """Return whether a waiting rank is known to wait for another one.

    For a collective, torch's record shows this. If there is no record (messages, the making of a group), or if it does not reach
    back far enough, the victim has to be stalled or the other rank to have failed.
    """
    if other.rank == victim.rank or other.state == "dead":
        return False
    mine, proven = victim.collective, victim.stalled or other.state == "failed"
    if mine is None:
        return proven and victim.partner in (None, other.rank)
    if not _is_member(victim, other, mine):
        return False
    begun = None if is_point_to_point(mine) else _has_begun(other, victim, mine)
    return not begun and (begun is False or proven)


def _is_member(victim: RankState, other: RankState, mine: RecordedCollective) -> bool:
    ranks = victim.report.groups.get(mine.group) if victim.report is not None else None
    return ranks is None or other.rank in ranks


def members(states: tuple[RankState, ...], victim: RankState) -> list[RankState]:
    """Return the ranks of the group in whose collective a rank waits."""
    mine = victim.collective
    return [state for state in states if mine is None or _is_member(victim, state, mine)]


def is_in(state: RankState, mine: RecordedCollective) -> bool:
    """Return whether a rank waits in this call too."""
    found = state.collective
    return found is not None and (found.group, found.sequence, found.backend) == (mine.group, mine.sequence, mine.backend)


def _record(state: RankState, victim: RankState, mine: RecordedCollective) -> list[RecordedCollective] | None:
    """Return a rank's record of the group in which another one waits; None if nothing is known about it."""
    if state.state == "dead" or state.report is None or victim.report is None:
        return None
    if not is_point_to_point(mine) and victim.report.groups.get(mine.group) != state.report.groups.get(mine.group):
        return None if not state.report.groups else []  # another group of the same name, or no group any more
    own = [one for one in state.report.collectives if (one.group, one.backend) == (mine.group, mine.backend)]
    return [one for one in own if not is_point_to_point(one)]


def _has_begun(state: RankState, victim: RankState, mine: RecordedCollective) -> bool | None:
    """Return whether a rank has made the call in which another one waits, or a later one; None if that is not known."""
    record = _record(state, victim, mine)
    if record:
        return max(one.sequence for one in record) >= mine.sequence
    begun = state.report.begun.get(mine.group, 0) if state.report is not None else None
    return False if record is not None and begun == 0 else None


def same_number(state: RankState, victim: RankState, mine: RecordedCollective) -> RecordedCollective | None:
    """Return the collective that a rank called under the number of ``mine`` in the same group, as far as it is known."""
    record = _record(state, victim, mine) or ()
    return next((one for one in record if one.sequence == mine.sequence), None)


def is_point_to_point(collective: RecordedCollective) -> bool:
    """Return whether this is a message between two ranks, whose number other ranks do not share."""
    return collective.name.startswith(("send", "recv"))
