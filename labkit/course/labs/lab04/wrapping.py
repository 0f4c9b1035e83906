"""Exercise 3 of notebook 04: as few groups as a memory limit allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from labkit.course.labs.checks import Pool, ask, hint_for, refuse
from labkit.course.labs.lab04.rows import WIDTH, forward_and_backward, sharded_row
from labkit.errors import ExerciseError

Wrap = Callable[[int, list[int], int], Sequence[int]]

_NUM_RANDOM = 60
_NOTHING_FOUND = (
    "Every row that is tried can be cut. A peak equal to the limit is within it, and one group of all layers and a group for each "
    "layer are cuts too."
)


class Row(NamedTuple):
    """The arguments of ``wrap``: the bytes of the root, the bytes of each layer, and the limit."""

    root: int
    sizes: list[int]
    cap: int

    def __str__(self) -> str:
        return f"root {self.root:,}, layers {self.sizes}, limit {self.cap:,}"


@dataclass(frozen=True)
class Wrapped:
    """The effect of a wrapping on a rank.

    Attributes:
        peak_bytes: The peak number of bytes gathered or being gathered.
        num_gathers: All-gathers of a step; with one rank, unshards.
    """

    peak_bytes: int
    num_gathers: int


def check_wrap(pool: Pool, wrap: Wrap, *, timeout_s: float = 60.0) -> str:
    """Exercise 3: ``wrap(root, sizes, cap)`` cuts a row of layers into groups.

    First it is tried on many random rows and compared with all possible cuts. Then one row is built and wrapped according to the
    answer, and its peak is measured on the ranks.

    Args:
        pool: The pool.
        wrap: Takes the root's bytes, the bytes of each layer and the limit; returns the number of layers in each group, in order.
        timeout_s: Seconds after which the measuring counts as hung.

    Returns:
        A line with the measured peak and the number of all-gathers.

    Raises:
        ExerciseError: A limit is exceeded, fewer groups would do, or ``wrap`` raises; the message shows one case.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    for row in _cases():
        _judge(wrap, row, _answer(wrap, row))
    widths = [8, 8, 20, 8, 8, 4]
    sizes = [2 * WIDTH * width * 4 for width in widths]
    root = WIDTH * WIDTH * 4
    cap = root + max(sizes) + sizes[0] + sizes[1]
    lengths = _answer(wrap, Row(root, sizes, cap))
    _judge(wrap, Row(root, sizes, cap), lengths)
    measured = pool.run(_measure, widths, lengths, timeout_s=timeout_s).same()
    if measured.peak_bytes > cap:
        refuse(
            f"On the ranks {lengths} has a peak of {measured.peak_bytes:,} bytes, {measured.peak_bytes - cap:,} too many.",
            f"{cap:,}.",
        )
    return (
        f"Solved: the fewest groups in {_NUM_RANDOM + 4} rows of layers. A real model, wrapped as {lengths}, has a peak of "
        f"{measured.peak_bytes:,} bytes, the limit is {cap:,}, and {measured.num_gathers} all-gathers a step."
    )


def live_peak(root: int, groups: Sequence[int]) -> int:
    """Return the peak of live bytes: the root, the group in use, and the group that backward has already requested."""
    return root + max([sum(pair) for pair in pairwise(groups)] or [groups[0]])


def _cases() -> list[Row]:
    cases = [Row(1, [2, 2, 2, 2], 5), Row(1, [2, 2, 2, 2], 9), Row(3, [1, 1, 4, 1, 1, 1], 9), Row(2, [5], 7)]
    dice = random.Random(4)
    for _ in range(_NUM_RANDOM):
        sizes = [dice.randint(1, 9) for _ in range(dice.randint(1, 8))]
        root = dice.randint(1, 5)
        cases.append(Row(root, sizes, live_peak(root, sizes) + dice.randint(0, 12)))
    return cases


def _answer(wrap: Wrap, row: Row) -> list[int]:
    found = ask(wrap, row.root, list(row.sizes), row.cap, case=str(row))
    if found is None:
        refuse(f"{row}: wrap returned None.", "the number of layers of each group.", _NOTHING_FOUND)
    return _as_lengths(row, found)


def _as_lengths(row: Row, answer: Any) -> list[int]:
    try:
        lengths = [int(length) for length in answer]
    except (TypeError, ValueError):
        raise ExerciseError(
            f"{row}: wrap returned {answer!r}. It has to return a list of numbers: how many layers each group has."
        ) from None
    layers = len(row.sizes)
    if sum(lengths) != layers or any(length < 1 for length in lengths):
        hint = hint_for(
            lengths,
            [
                (lambda found: sum(found) == sum(row.sizes), "These look like the bytes of the groups. Count their layers."),
                (
                    lambda found: found == sorted(set(found)) and found[-1] <= layers,
                    "These look like the places of the cuts. The layers of a group lie between two of them: end minus begin.",
                ),
            ],
        )
        refuse(f"{row}: {lengths} are {sum(lengths)} layers.", f"groups of at least one layer, {layers} layers together.", hint)
    return lengths


def _groups(sizes: Sequence[int], lengths: Sequence[int]) -> list[int]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [sum(sizes[begin:end]) for begin, end in pairwise([0, *ends])]


def _fewest(row: Row, peak: Callable[[int, Sequence[int]], int] = live_peak) -> int:
    """Return the fewest groups whose peak is within the limit, or 0 if no grouping is. ``peak`` may be a wrong rule."""
    for num_groups in range(1, len(row.sizes) + 1):
        for cuts in combinations(range(1, len(row.sizes)), num_groups - 1):
            groups = [sum(row.sizes[begin:end]) for begin, end in pairwise((0, *cuts, len(row.sizes)))]
            if peak(row.root, groups) <= row.cap:
                return num_groups
    return 0


def _judge(wrap: Wrap, row: Row, lengths: list[int]) -> None:
    groups = _groups(row.sizes, lengths)
    peak, fewest = live_peak(row.root, groups), _fewest(row)
    what = f"{row}: you return {lengths}, groups with {groups} bytes"
    if peak > row.cap:
        refuse(
            f"{what}, which keep {peak:,} alive, {peak - row.cap:,} too many.", f"at most {row.cap:,}.", _hint_for_peak(row, groups)
        )
    if len(groups) > fewest:
        more = f"{len(groups)} groups, {len(groups) - fewest} more than needed"
        refuse(f"{what}: {more}.", f"{fewest}.", _hint_for_number(wrap, row, groups, fewest))


def _hint_for_peak(row: Row, groups: list[int]) -> str:
    peak = live_peak(row.root, groups)
    if len(groups) == 1 and peak - row.root > row.cap:
        return "A single group has no neighbour, but its own bytes count: it is alive beside the root."
    if row.root + max(groups) <= row.cap:
        return "Each group fits alone. In backward the next group is gathered while one is in use: two neighbours live together."
    if peak - row.root <= row.cap:
        return "The root is alive all the time, beside the groups."
    return "Which groups are alive at the same moment? Look at the picture of backward."


def _hint_for_number(wrap: Wrap, row: Row, groups: list[int], fewest: int) -> str:
    if len(groups) == len(row.sizes):
        return "A group per layer always fits, and costs the most gathers. Join layers where the limit allows it."
    if fewest == 1:
        return "One group of all layers is a cut too: with no neighbour, only its own bytes are alive beside the root."
    return hint_for(
        wrap,
        [(_counts_two_largest, "Only neighbours live together. The two largest groups need not be neighbours.")],
        "Filling each group as far as it goes is not always best: a small one leaves room beside it. Try all cuts.",
    )


def _counts_two_largest(wrap: Wrap) -> bool:
    """Return whether every answer has as many groups as the two-largest rule requires, wherever that rule has an answer."""
    wanted = [(row, _fewest(row, lambda root, groups: root + sum(sorted(groups)[-2:]))) for row in _cases()]
    return all(len(wrap(row.root, list(row.sizes), row.cap)) == number for row, number in wanted if number)


def _measure(widths: list[int], lengths: list[int]) -> Wrapped:
    from labkit.spmd import record_events
    from labkit.spmd.trace.events import UNSHARD

    model = sharded_row(widths, lengths)
    with record_events(model) as recording:
        forward_and_backward(model)
    trace = recording.trace()
    return Wrapped(trace.peak_live_bytes, trace.calls(UNSHARD)[1])
