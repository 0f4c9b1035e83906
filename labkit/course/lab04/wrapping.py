"""Exercise 3 of notebook 04: as few groups as a memory limit allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from labkit.course.checks import Pool, ask, from_cell, refuse
from labkit.errors import ExerciseError

Wrap = Callable[[int, list[int], int], Sequence[int]]

_WIDTH = 12
_NUM_RANDOM = 60
_NOTHING_FOUND = (
    "Every row that is tried can be cut. A peak equal to the limit is within it, and one group of all layers and a group for each "
    "layer are cuts too."
)


@dataclass(frozen=True)
class Wrapped:
    """What a wrapping did on a rank.

    Attributes:
        peak_bytes: The most bytes that were whole or on their way.
        num_gathers: All-gathers of a step; with one rank, unshards.
    """

    peak_bytes: int
    num_gathers: int


def check_wrap(pool: Pool, wrap: Wrap, *, timeout_s: float = 60.0) -> str:
    """Exercise 3: ``wrap(root, sizes, cap)`` cuts a row of layers into groups.

    First it is tried on many random rows against every possible cut; then one row is built, wrapped as the answer says, and
    its peak is measured on the ranks.

    Args:
        pool: The pool.
        wrap: Takes the root's bytes, the bytes of each layer and the limit; returns how many layers each group has, in order.
        timeout_s: Seconds after which the measuring counts as hung.

    Returns:
        A line with the measured peak and the number of all-gathers.

    Raises:
        ExerciseError: A limit is exceeded, fewer groups would do, or ``wrap`` raises; the message shows one case.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    for root, sizes, cap in _cases():
        _judge(root, sizes, cap, _answer(wrap, root, sizes, cap))
    widths = [8, 8, 20, 8, 8, 4]
    sizes = [2 * _WIDTH * width * 4 for width in widths]
    root = _WIDTH * _WIDTH * 4
    cap = root + max(sizes) + sizes[0] + sizes[1]
    lengths = _answer(wrap, root, sizes, cap)
    _judge(root, sizes, cap, lengths)
    measured = pool.run(_measure, widths, lengths, timeout_s=timeout_s).same()
    if measured.peak_bytes > cap:
        refuse(
            f"On the ranks {lengths} has a peak of {measured.peak_bytes:,} bytes, {measured.peak_bytes - cap:,} too many.",
            f"{cap:,}.",
        )
    return (
        f"Solved: the fewest groups in {_NUM_RANDOM + 4} rows of layers. Wrapped as {lengths}, a real model keeps at most "
        f"{measured.peak_bytes:,} of {cap:,} bytes alive, with {measured.num_gathers} all-gathers a step."
    )


def live_peak(root: int, groups: Sequence[int]) -> int:
    """The most bytes that are alive: the root, the group in use, and the one that backward has asked for."""
    return root + max([sum(pair) for pair in pairwise(groups)] or [groups[0]])


def _cases() -> list[tuple[int, list[int], int]]:
    cases = [(1, [2, 2, 2, 2], 5), (1, [2, 2, 2, 2], 9), (3, [1, 1, 4, 1, 1, 1], 9), (2, [5], 7)]
    dice = random.Random(4)
    for _ in range(_NUM_RANDOM):
        sizes = [dice.randint(1, 9) for _ in range(dice.randint(1, 8))]
        root = dice.randint(1, 5)
        cases.append((root, sizes, live_peak(root, sizes) + dice.randint(0, 12)))
    return cases


def _answer(wrap: Wrap, root: int, sizes: list[int], cap: int) -> list[int]:
    row = f"root {root:,}, layers {sizes}, limit {cap:,}"
    found = ask(wrap, root, list(sizes), cap, case=row)
    if found is None:
        refuse(f"{row}: wrap returned None.", "the number of layers of each group.", _NOTHING_FOUND)
    return _as_lengths(row, found, sizes)


def _as_lengths(row: str, answer: Any, sizes: Sequence[int]) -> list[int]:
    try:
        lengths = [int(length) for length in answer]
    except (TypeError, ValueError):
        raise ExerciseError(
            f"{row}: wrap returned {answer!r}. It has to return a list of numbers: how many layers each group has."
        ) from None
    if sum(lengths) != len(sizes) or any(length < 1 for length in lengths):
        refuse(f"{row}: {lengths} are {sum(lengths)} layers.", f"groups of at least one layer, {len(sizes)} layers together.")
    return lengths


def _groups(sizes: Sequence[int], lengths: Sequence[int]) -> list[int]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [sum(sizes[begin:end]) for begin, end in pairwise([0, *ends])]


def _fewest(root: int, sizes: Sequence[int], cap: int) -> int:
    for num_groups in range(1, len(sizes) + 1):
        for cuts in combinations(range(1, len(sizes)), num_groups - 1):
            groups = [sum(sizes[begin:end]) for begin, end in pairwise((0, *cuts, len(sizes)))]
            if live_peak(root, groups) <= cap:
                return num_groups
    raise AssertionError(f"no wrapping of {sizes} fits into {cap}")


def _judge(root: int, sizes: Sequence[int], cap: int, lengths: list[int]) -> None:
    groups = _groups(sizes, lengths)
    peak, fewest = live_peak(root, groups), _fewest(root, sizes, cap)
    what = f"root {root:,}, layers {sizes}, limit {cap:,}: your groups {groups}"
    if peak > cap:
        if len(groups) == 1 and peak - root > cap:
            hint = "A single group has no neighbour, but its own bytes count: it is alive beside the root."
        elif root + max(groups) <= cap < peak:
            hint = (
                "Each group fits alone. In backward the next group is gathered while one is in use: two neighbours live together."
            )
        elif peak - root <= cap:
            hint = "The root is alive all the time, beside the groups."
        else:
            hint = "Which groups are alive at the same moment? Look at the picture of backward."
        refuse(f"{what} keep {peak:,} alive, {peak - cap:,} too many.", f"at most {cap:,}.", hint)
    if len(groups) > fewest:
        alone = len(groups) == len(sizes) > fewest
        hint = (
            "A group per layer always fits, and costs the most gathers. Join layers where the limit allows it."
            if alone
            else "One group of all layers is a cut too: with no neighbour, only its own bytes are alive beside the root."
            if fewest == 1
            else "Filling each group as far as it goes is not always best: a small one leaves room beside it. Try all cuts."
        )
        refuse(f"{what} are {len(groups)} groups, {len(groups) - fewest} more than needed.", f"{fewest}.", hint)


def _measure(widths: list[int], lengths: list[int]) -> Wrapped:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from labkit.spmd import record_events
    from labkit.spmd.events import UNSHARD

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.full((_WIDTH, width), 0.01))
            self.down = nn.Parameter(torch.full((_WIDTH, width), 0.01))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (x @ self.up) @ self.down.T

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.eye(_WIDTH))
            self.layers = nn.ModuleList(Layer(width) for width in widths)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x @ self.first
            for layer in self.layers:
                x = layer(x)
            return x

    device = from_cell("device")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, begin = Row().to(device), 0
    for length in lengths:
        group = list(model.layers[begin : begin + length])
        fully_shard(group if length > 1 else group[0], mesh=mesh)
        begin += length
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, _WIDTH, device=device)
    model(x).sum().backward()
    with record_events(model) as recording:
        model(x).sum().backward()
    trace = recording.trace()
    return Wrapped(trace.peak_live_bytes, trace.calls(UNSHARD)[1])
