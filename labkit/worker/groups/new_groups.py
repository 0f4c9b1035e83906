"""A watch on the making of process groups: when each was made, and whether the ranks make the same one.

Each rank numbers its new_group calls itself, and torch lets the members of a group find each other under that number. If ranks make
different groups in one call, ranks meet that do not belong together, and wait in native code for connections that never come. So
the first rank at a call writes down which group it makes, and any rank that makes another one raises an error that names both. This
takes one request to the store, and no rank waits for another. Groups of one rank each may differ, because their members look for
no other rank: ``dist.new_subgroups(1, group=...)`` makes such groups.

Two cases are not noticed here: groups made with ``use_local_synchronization``, which torch finds by their ranks and not by a
number, and calls that only some ranks make. The counters reveal those at the end of the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d as c10d

from labkit.base.plain_text import name_ranks

# How long a rank that found a difference looks for the groups that the others make; they are at the same call.
LOOK_S = 0.5
_POLL_S = 0.01

_born_ns: dict[str, int] = {}
# Number of default groups made so far: the numbers of groups restart with each, and a store may outlive it.
_generation = [0]
_make: Any = c10d._new_process_group_helper


def install() -> None:
    """Begin to watch."""
    c10d._new_process_group_helper = _watched  # type: ignore[assignment]


def born_ns(name: str) -> int:
    """Return when the present group of this name was made, in nanoseconds since the epoch; 0 if that is not known."""
    return _born_ns.get(name, 0)


def _watched(size: int, rank: Any, ranks: Sequence[int], backend: Any, store: Any, name: str, *args: Any, **more: Any) -> Any:
    if not ranks:
        _generation[0] += 1
    elif name.isdecimal():
        _check(store, name, list(ranks))
    _born_ns[name] = time.time_ns()
    return _make(size, rank, ranks, backend, store, name, *args, **more)


def _check(store: Any, name: str, ranks: list[int]) -> None:
    """Raise an error if another rank makes a different group in the same call.

    Raises:
        ValueError: The groups differ; the message names the groups and the ranks that make them.
    """
    place = f"labkit/new_group/{_generation[0]}/{name}"
    own, me = json.dumps(ranks), c10d.get_rank()
    store.set(f"{place}/{me}", own)
    first = store.compare_set(place, "", own).decode()
    if first == own or len(ranks) == len(json.loads(first)) == 1:
        return
    makers = _makers(store, place)
    told = ", ".join(f"{name_ranks(tuple(who))} of {list(json.loads(what))}" for what, who in makers.items())
    raise ValueError(
        f"the ranks made different groups in the same new_group call: {told}. Every rank has to make every group in the same "
        "order, those that it is no member of too: call dist.new_group for each of them on all ranks."
    )


def _makers(store: Any, place: str) -> dict[str, list[int]]:
    """Return the ranks that make each group, as far as they report it within LOOK_S."""
    deadline = time.monotonic() + LOOK_S
    waited_for = list(range(c10d.get_world_size()))
    makers: dict[str, list[int]] = {}
    while waited_for and time.monotonic() < deadline:
        for rank in [rank for rank in waited_for if store.check([f"{place}/{rank}"])]:
            waited_for.remove(rank)
            makers.setdefault(store.get(f"{place}/{rank}").decode(), []).append(rank)
        if waited_for:
            time.sleep(_POLL_S)
    return {what: sorted(makers[what]) for what in sorted(makers, key=lambda what: min(makers[what]))}
