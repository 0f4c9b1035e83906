"""Exercise 1 of notebook 07: how many bytes a mesh's rings send between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from labkit.course.labs.checks import ask, hint_for, refuse
from labkit.errors import ExerciseError

Groups = Sequence[Sequence[int]]
BetweenBytes = Callable[[Groups, int, int], int]


@dataclass(frozen=True)
class GroupCase:
    """Groups of ranks, and how many ranks have their successor on another node."""

    what: str
    groups: tuple[tuple[int, ...], ...]
    ranks_per_node: int
    num_leaving: int


def check_between_bytes(between_bytes: BetweenBytes) -> str:
    """Exercise 1: ``between_bytes(groups, ranks_per_node, sent_bytes)`` returns the bytes that all ranks send to other nodes.

    Args:
        between_bytes: Takes the groups of one axis (lists of ranks, each in ring order), the number of ranks on a node, and the
            bytes that each rank sends to the next one; returns bytes.

    Returns:
        A line with the number of meshes.

    Raises:
        ExerciseError: An answer is wrong; the message names the groups and the difference.

    Ranks: controller.
    """
    cases, sent = _cases(), 1_000
    answers = [ask(between_bytes, [list(group) for group in case.groups], case.ranks_per_node, sent) for case in cases]
    for answer in answers:
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            raise ExerciseError(f"between_bytes returned {answer!r}. It has to return a number of bytes.")
    for case, answer in zip(cases, answers, strict=True):
        target = case.num_leaving * sent
        if answer != target:
            refuse(
                f"{case.what}, {case.ranks_per_node} ranks on a node, {sent:,} bytes from each rank: between_bytes says "
                f"{answer:,}, {answer - target:+,} off.",
                f"{target:,} bytes.",
                hint_for(
                    [answer / sent for answer in answers],
                    _MISTAKES,
                    "Which ranks have their successor on another node? They send there.",
                ),
            )
    largest = max(sum(map(len, case.groups)) for case in cases)
    return f"Solved: {len(cases)} meshes of up to {largest:,} ranks, all right to the byte."


def _if(count: Callable[[GroupCase], float]) -> Callable[[Sequence[float]], bool]:
    """Return a test of whether a mistake explains every answer, given the number of links between nodes that it counts."""
    return lambda answers: all(answer == count(case) for answer, case in zip(answers, _cases(), strict=True))


def _links(counts: Callable[[int, int, GroupCase], bool]) -> Callable[[Sequence[float]], bool]:
    return _if(lambda case: sum(counts(*link, case) for group in case.groups for link in _ring(group)))


def _leaves(rank: int, following: int, case: GroupCase) -> bool:
    return rank // case.ranks_per_node != following // case.ranks_per_node


def _spans(group: Sequence[int], case: GroupCase) -> int:
    return len({rank // case.ranks_per_node for rank in group})


_MISTAKES: Any = [
    (
        _if(lambda case: sum(_leaves(*link, case) for group in case.groups for link in pairwise(group))),
        "A ring is closed: the last rank of a group sends to the first.",
    ),
    (
        _if(lambda case: sum(len(group) for group in case.groups if _spans(group, case) > 1)),
        "In a group that spans nodes, not every rank sends out of its node: the next rank may be on the same node.",
    ),
    (_links(lambda *_: True), "These are all bytes sent. Bytes that stay on a node do not count."),
    (
        _if(lambda case: sum(_spans(group, case) for group in case.groups if _spans(group, case) > 1)),
        "You count the nodes of a group. The order of the ring matters: it may leave the same node twice.",
    ),
    (
        _if(lambda case: sum(_leaves(*link, case) for link in _ring(case.groups[0]))),
        "This is one group. All groups of the axis work at the same time.",
    ),
    (
        _links(lambda rank, following, case: rank % case.ranks_per_node != following % case.ranks_per_node),
        "rank % ranks_per_node is the place of a rank on its node. rank // ranks_per_node is the node.",
    ),
    (
        _if(lambda case: 2 * case.num_leaving),
        "Twice too much: a rank sends only to the next one of its ring, not to the one before it.",
    ),
    (
        _links(lambda rank, following, case: abs(rank - following) >= case.ranks_per_node),
        "The distance of two numbers does not show whether a node ends between them: compare the nodes of both ranks.",
    ),
]


def _ring(group: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(group, [*group[1:], group[0]], strict=True))


def _cases() -> list[GroupCase]:
    def rows(num: int, size: int, step: int = 1, stride: int = 1) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(row * step + place * stride for place in range(size)) for row in range(num))

    return [
        GroupCase("groups inside nodes", rows(2, 4, step=4), 4, 0),
        GroupCase("FSDP over 8 ranks", rows(1, 8), 4, 2),
        GroupCase("HSDP's replicas, one on each of 2 nodes", rows(4, 2, stride=4), 4, 8),
        GroupCase("one group over a node and a half", rows(1, 6), 4, 2),
        GroupCase("each rank alone", rows(4, 1), 2, 0),
        GroupCase("one rank on each of 3 nodes", rows(1, 3), 1, 3),
        GroupCase("a ring that goes back and forth between 2 nodes", ((0, 4, 1, 5),), 4, 4),
        GroupCase("FSDP over 1,024 ranks", rows(1, 1024), 8, 128),
        GroupCase("HSDP's replicas on 128 nodes", rows(8, 128, stride=8), 8, 1024),
    ]
