"""Exercise 4 of notebook 02: recompute as little as a memory limit allows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from labkit.course.labs.checks import ask, refuse
from labkit.errors import ExerciseError

Choose = Callable[[list[int], list[int], list[float], int], Iterable[int]]

_NUM_RANDOM = 60


@dataclass(frozen=True)
class _Tried:
    """A row of blocks, and the learner's choice for it."""

    saved: list[int]
    inputs: list[int]
    seconds: list[float]
    limit: int
    chosen: set[int]

    def is_best(self, chosen: set[int] | None = None, peak: Callable[..., int] | None = None, below: int = 0) -> bool:
        """Return whether a choice is fastest if ``peak`` computes the peak and the limit is lowered by ``below``."""
        chosen, peak = self.chosen if chosen is None else chosen, peak or peak_bytes
        fits = chosen <= set(range(len(self.saved))) and peak(self.saved, self.inputs, chosen) <= self.limit - below
        return fits and _time(self.seconds, chosen) == _least(self.saved, self.inputs, self.seconds, self.limit - below, peak)


def check_choose(choose: Choose) -> str:
    """Exercise 4: ``choose(saved, inputs, seconds, limit)`` names the blocks to recompute, with the least time under the limit.

    It is tried on many rows of blocks and compared with every possible choice.

    Args:
        choose: Takes three lists (each block's saved bytes, input bytes, and seconds of forward) and the limit in bytes; returns
            the places of the blocks to recompute.

    Returns:
        A line with the number of rows.

    Raises:
        ExerciseError: A limit is exceeded, or less recomputation would be enough; the message shows one case.

    Ranks: controller; no rank takes part.
    """
    tried: list[_Tried] = []
    for saved, inputs, seconds, limit in _cases():
        chosen = _as_places(ask(choose, list(saved), list(inputs), list(seconds), limit), len(saved))
        tried.append(_Tried(saved, inputs, seconds, limit, chosen))
        _judge(tried)
    recomputed = sum(len(case.chosen) for case in tried)
    return f"Solved: the least recomputation in {len(tried)} rows of blocks, {recomputed} blocks recomputed in all."


def peak_bytes(saved: Sequence[int], inputs: Sequence[int], chosen: Iterable[int]) -> int:
    """Return the peak in bytes: the running block's own activations, plus what is kept from the blocks before it."""
    recomputed, held, peak = set(chosen), 0, 0
    for place, own in enumerate(saved):
        peak = max(peak, held + own)
        held += inputs[place] if place in recomputed else own
    return peak


def _cases() -> list[tuple[list[int], list[int], list[float], int]]:
    # In the second row, one choice is best, a different one is best if a running block's own activations are forgotten, and no two
    # blocks are alike.
    cases = [([10] * 4, [1] * 4, [1.0] * 4, 40), ([8] * 4, [1] * 4, [1.0, 5.0, 5.0, 0.5], 25), ([10] * 4, [1] * 4, [1.0] * 4, 31)]
    cases += [([10] * 4, [1] * 4, [1.0] * 4, 13), ([9, 5, 5, 1], [1, 1, 1, 1], [3.0, 2.0, 2.0, 1.0], 12)]
    dice = random.Random(2)
    for _ in range(_NUM_RANDOM):
        saved = [dice.randint(2, 12) for _ in range(dice.randint(1, 7))]
        inputs = [dice.randint(1, size) for size in saved]
        seconds = [float(dice.randint(1, 9)) for _ in saved]
        least = peak_bytes(saved, inputs, range(len(saved)))
        cases.append((saved, inputs, seconds, dice.randint(least, max(least, sum(saved)))))
    return cases


def _as_places(answer: Any, num_blocks: int) -> set[int]:
    try:
        answer = list(answer)
        if any(isinstance(place, bool) for place in answer):
            raise ExerciseError(f"choose returned {answer!r}. It has to return places such as [0, 2], not a mask.")
        places = {int(place) for place in answer}
    except (TypeError, ValueError):
        raise ExerciseError(f"choose returned {answer!r}. It has to return the places of the blocks to recompute.") from None
    if not places <= set(range(num_blocks)):
        raise ExerciseError(f"choose returned {sorted(places)} for {num_blocks} blocks; places go from 0 to {num_blocks - 1}.")
    return places


def _least(
    saved: Sequence[int], inputs: Sequence[int], seconds: Sequence[float], limit: int, peak: Callable[..., int] = peak_bytes
) -> float:
    every = (set(places) for size in range(len(saved) + 1) for places in combinations(range(len(saved)), size))
    return min((_time(seconds, places) for places in every if peak(saved, inputs, places) <= limit), default=math.inf)


def _time(seconds: Sequence[float], places: Iterable[int]) -> float:
    return sum(seconds[place] for place in places)


def _held_at_the_end(saved: Sequence[int], inputs: Sequence[int], chosen: set[int]) -> int:
    """Return the peak computed with a mistake: forgetting that a running block holds all its own activations."""
    return sum(inputs[place] if place in chosen else own for place, own in enumerate(saved))


def _held_before_the_last(saved: Sequence[int], inputs: Sequence[int], chosen: set[int]) -> int:
    return _held_at_the_end(saved[:-1], inputs, chosen)


def _judge(tried: list[_Tried]) -> None:
    """Judge the last case; the earlier ones show which mistake explains it."""
    last = tried[-1]
    saved, inputs, seconds, limit, chosen = last.saved, last.inputs, last.seconds, last.limit, last.chosen
    peak, time, least = peak_bytes(saved, inputs, chosen), _time(seconds, chosen), _least(saved, inputs, seconds, limit)
    case = f"blocks that save {saved}, inputs {inputs}, seconds {seconds}, limit {limit}: recomputing {sorted(chosen)}"
    if peak > limit:
        refuse(f"{case} peaks at {peak}, {peak - limit} too many.", f"at most {limit}.", _hint_for_peak(tried))
    if time > least:
        hint = _SHIFTED if _is_shifted(tried) else _hint_for_time(saved, inputs, seconds, limit, chosen)
        refuse(f"{case} costs {time:g} s, {time - least:g} more than needed.", f"{least:g} s.", hint)


_SHIFTED = "With each place one lower it would be the best choice, in every row so far. Places count from 0."
_OWN = (
    "What is held between the blocks fits. But while a block runs, even one to be recomputed, all its own activations are in "
    "memory as well."
)


def _is_shifted(tried: list[_Tried]) -> bool:
    return bool(tried[-1].chosen) and all(case.is_best({place - 1 for place in case.chosen}) for case in tried)


def _hint_for_peak(tried: list[_Tried]) -> str:
    last = tried[-1]
    if any(all(case.is_best(peak=wrong) for case in tried) for wrong in (_held_at_the_end, _held_before_the_last)):
        return _OWN
    if _is_shifted(tried):
        return _SHIFTED
    if peak_bytes(last.saved, [0] * len(last.saved), last.chosen) <= last.limit:
        return "It would fit if a recomputed block held nothing. But it keeps its input."
    if _held_before_the_last(last.saved, last.inputs, last.chosen) <= last.limit:
        return _OWN
    return "Walk through the blocks: what is held for the earlier ones, and what does the running one need?"


def _hint_for_time(saved: list[int], inputs: list[int], seconds: list[float], limit: int, chosen: set[int]) -> str:
    last, every = len(saved) - 1, set(range(len(saved)))
    if last in chosen and peak_bytes(saved, inputs, chosen - {last}) <= limit:
        hint = "Recomputing the last block saves nothing: its activations are there when it runs, and backward begins with it."
        if chosen == every and peak_bytes(saved, inputs, ()) <= limit:
            hint += " Here nothing has to be recomputed at all. If these are the blocks to keep, return the others."
        return hint
    if chosen == every:
        return "Recomputing all always fits, if anything does. Keep as much as the limit allows."
    others = every - chosen
    if peak_bytes(saved, inputs, others) <= limit and _time(seconds, others) == _least(saved, inputs, seconds, limit):
        return "These are the blocks to keep. Return the ones to recompute."
    kept_peak = peak_bytes(saved, inputs, ())
    if kept_peak <= limit and len(chosen) == last:
        return "Keeping everything already fits, so nothing has to be recomputed."
    if kept_peak == limit and _time(seconds, chosen) == _least(saved, inputs, seconds, limit - 1):
        return "This is the best choice for a limit that is one byte lower. A peak equal to the limit fits."
    if kept_peak <= limit:
        return "Keeping everything already fits. Count the block that runs once: its own bytes are held only after it."
    by_number = (places for size in range(len(saved) + 1) for places in combinations(range(len(saved)), size))
    if chosen == set(next(places for places in by_number if peak_bytes(saved, inputs, places) <= limit)):
        return "This is the first choice of the fewest blocks, but the fewest blocks are not the least time. Compare the seconds."
    return "Taking block after block, the largest or the cheapest first, is not always best. Try all choices."
