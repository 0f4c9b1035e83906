"""A search for what a run left open although it ended well: collectives or groups that not all ranks have begun or made.

The group's next collective would be matched with an open one, and both would give wrong values without an error. With its result,
every rank reports how much it has begun. If the ranks of a group differ in that, they are asked again, for torch's own record:
sends and receives count too, and each rank has its own number of those.

Nothing is concluded while another thread of the reader's runs beside the main one on any rank: it may be about to begin the missing
collective, as an asynchronous save does. The same holds if torch's record does not reach back to the group's last collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from labkit.base.plain_text import name_ranks
from labkit.controller.hang.verdict import DEFAULT_GROUP
from labkit.errors import LeftOpen
from labkit.wire.messages import Begun, RankReport, RecordedCollective


def may_be_open(begun: Mapping[int, Begun | None], all_ranks: Sequence[int]) -> bool:
    """Return whether the ranks of a group have begun different numbers of operations, or made different numbers of groups.

    Args:
        begun: The report of each rank of the run.
        all_ranks: Every rank of the pool; those outside the run have begun nothing.
    """
    told = [one for one in begun.values() if one is not None]
    if not told:
        return False
    if len(told) < len(all_ranks) or len({one.group_count for one in told}) > 1:
        return True
    return any(
        other is None or other.ranks.get(name) != ranks or other.counts[name] != one.counts[name]
        for one in told
        for name, ranks in one.ranks.items()
        for other in map(begun.get, ranks)
    )


def find_open(reports: Mapping[int, RankReport]) -> tuple[LeftOpen, ...]:
    """Return the collectives that some ranks of a group have begun and others have not.

    Args:
        reports: One for each rank of the pool, made when the run had ended on all of them.
    """
    if any(report.others_at_work or report.run_id is not None for report in reports.values()):
        return ()
    groups = {(name, ranks) for report in reports.values() for name, ranks in report.groups.items()}
    return tuple(found for name, ranks in sorted(groups) for found in _find_in_group(reports, name, ranks))


def _find_in_group(reports: Mapping[int, RankReport], name: str, ranks: tuple[int, ...]) -> Iterator[LeftOpen]:
    calls: dict[str, dict[int, RecordedCollective]] = {}  # the last one of each rank, by backend
    for rank in ranks:
        report = reports.get(rank)
        if report is None or report.groups.get(name) != ranks:
            return  # this rank has destroyed the group or never made it
        own = [one for one in report.collectives if one.group == name]
        if not own and report.begun.get(name):
            return  # it began only sends and receives, or its record no longer reaches back to the collective
        for one in own:
            calls.setdefault(one.backend, {})[rank] = one
    for last in calls.values():
        furthest = max(last.values(), key=lambda call: call.sequence)
        begun = tuple(rank for rank, call in last.items() if call.sequence == furthest.sequence)
        if len(begun) < len(ranks):
            group = "the default group" if name == DEFAULT_GROUP else f"the group of {name_ranks(ranks)}"
            missing = tuple(rank for rank in ranks if rank not in begun)
            yield LeftOpen(furthest.name, furthest.sequence, group, begun, missing)


def describe_counters(reports: Mapping[int, RankReport]) -> str:
    """Return a sentence if ranks have made different numbers of groups, else an empty string."""
    counts: dict[int, list[int]] = {}
    for rank, report in sorted(reports.items()):
        counts.setdefault(report.group_count, []).append(rank)
    if len(counts) < 2 or any(report.others_at_work for report in reports.values()):
        return ""
    least = min(counts)
    told = "; ".join(
        f"{name_ranks(ranks)} {count - least} more" for count, ranks in sorted(counts.items(), reverse=True) if count > least
    )
    return (
        f"The ranks have made different numbers of process groups: {told} than {name_ranks(counts[least])}. Every rank has to call "
        "dist.new_group for every group, also for those that it is no member of; under torchrun the next call would hang. "
        "labkit has made the counters equal again."
    )
