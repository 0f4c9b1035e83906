"""Exercise 1 of notebook 04: write down the order of the events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NoReturn

from labkit.course.checks import Pool, ask, hint_for, refuse
from labkit.course.lab04.steps import StepCase, measured_once, recorded_step
from labkit.errors import ExerciseError

EventOrder = Callable[[int, bool, bool], Sequence[str]]


def check_event_order(pool: Pool, event_order: EventOrder, *, timeout_s: float = 120.0) -> str:
    """Exercise 1: ``event_order(num_blocks, reshard, prefetch)`` writes what the runtime will do in one training step.

    The answers are compared with recorded steps of real models, with 1, 3 and 4 blocks and every setting.

    Args:
        pool: The pool.
        event_order: Returns texts such as ``U root``, ``U 0``, ``R 0``, in order.
        timeout_s: Seconds after which the recording counts as hung.

    Returns:
        A line with the number of orders and events.

    Raises:
        ExerciseError: An order differs, or ``event_order`` raises; the message shows the case and the first event that differs.

    Ranks: controller. Blocks for ``timeout_s`` and a few seconds at most.
    """
    cases = [StepCase(n, reshard, prefetch) for n in (3, 1, 4) for reshard, prefetch in product((True, False), repeat=2)]
    recorded = measured_once(pool, _orders, cases, timeout_s=timeout_s)
    num_events = 0
    for case, truth in zip(cases, recorded, strict=True):
        answer = _as_texts(ask(event_order, case.num_blocks, case.reshard, case.prefetch, case=_setting(case)))
        if answer != truth:
            _refuse_order(case, answer, truth)
        num_events += len(truth)
    ranks = f"{pool.world_size} rank{'s' if pool.world_size > 1 else ''}"
    return f"Solved: {len(cases)} orders with {num_events} events together, equal to what {ranks} recorded."


def _orders(cases: list[StepCase]) -> list[list[str]]:
    return [list(recorded_step(case).order(names=False)) for case in cases]


def _setting(case: StepCase) -> str:
    return f"{case.num_blocks} block{'s' if case.num_blocks > 1 else ''}, reshard={case.reshard}, prefetch={case.prefetch}"


def _as_texts(answer: Any) -> list[str]:
    if isinstance(answer, str) or not isinstance(answer, Sequence) or not all(isinstance(text, str) for text in answer):
        raise ExerciseError(f"event_order returned {answer!r}. It has to return a list of texts such as 'U root' and 'R 0'.")
    return [" ".join(text.split()) for text in answer]


def _refuse_order(case: StepCase, answer: list[str], truth: list[str]) -> NoReturn:
    place = next((i for i, (a, b) in enumerate(zip(answer, truth, strict=False)) if a != b), min(len(answer), len(truth)))
    said = (
        f"event {place + 1} is {answer[place]!r}" if place < len(answer) else f"only {len(answer)} of {len(truth)} events are there"
    )
    wanted = f"{truth[place]!r} comes there" if place < len(truth) else f"{len(truth)} events"
    refuse(
        f"{_setting(case)}: {said} in your order ({' '.join(answer[max(0, place - 2) : place + 3])}).",
        f"{wanted} ({' '.join(truth[max(0, place - 2) : place + 3])}).",
        hint_for(
            answer,
            [(_has_long_names, _LONG_NAMES), *((rule(case).__eq__, hint) for rule, hint in _WRONG_RULES)],
            "Compare with the picture: which bar begins first, and which one ends first?",
        ),
    )


_LONG_NAMES = "Write the short names, as printed above: 'U 0', not 'U layers.0'."


def _has_long_names(answer: list[str]) -> bool:
    return any("." in text for text in answer)


# Plausible wrong orders -------------------------------------------------------------------------------------------------


def _forward(case: StepCase, *, frees: bool | None = None) -> list[str]:
    events = ["U root"]
    for block in range(case.num_blocks):
        events.append(f"U {block}")
        if case.reshard if frees is None else frees:
            events.append(f"R {block}")
    return events


def _backward(case: StepCase, *, gathers: bool | None = None, prefetch: bool | None = None) -> list[str]:
    gathers = case.reshard if gathers is None else gathers
    ahead = case.prefetch if prefetch is None else prefetch
    events = []
    for block in reversed(range(case.num_blocks)):
        if gathers and (not ahead or block == case.num_blocks - 1):
            events.append(f"U {block}")
        if gathers and ahead and block > 0:
            events.append(f"U {block - 1}")
        events.append(f"R {block}")
    return events


def _no_prefetch(case: StepCase) -> list[str]:
    return [*_forward(case), *_backward(case, prefetch=False), "R root"]


def _always_prefetch(case: StepCase) -> list[str]:
    return [*_forward(case), *_backward(case, prefetch=True), "R root"]


def _root_freed(case: StepCase) -> list[str]:
    return [*_forward(case), "R root", "U root", *_backward(case), "R root"]


def _root_forgotten(case: StepCase) -> list[str]:
    return [*_forward(case), *_backward(case)]


def _reshard_ignored(case: StepCase) -> list[str]:
    return [*_forward(case, frees=True), *_backward(case, gathers=True), "R root"]


def _gathered_twice(case: StepCase) -> list[str]:
    return [*_forward(case), *_backward(case, gathers=True), "R root"]


def _kept_for_ever(case: StepCase) -> list[str]:
    return [] if case.reshard else [*_forward(case), "R root"]


def _all_kept_for_ever(case: StepCase) -> list[str]:
    return [] if case.reshard else _forward(case)


def _forward_only(case: StepCase) -> list[str]:
    return _forward(case)


def _backward_like_forward(case: StepCase) -> list[str]:
    events = [event for block in range(case.num_blocks) for event in ((f"U {block}",) if case.reshard else ()) + (f"R {block}",)]
    return [*_forward(case), *events, "R root"]


def _all_freed_at_the_end(case: StepCase) -> list[str]:
    blocks = [f"U {block}" for block in reversed(range(case.num_blocks))] if case.reshard else []
    return [*_forward(case), *blocks, *(f"R {block}" for block in reversed(range(case.num_blocks))), "R root"]


_KEPT_FOR_EVER = "With reshard=False the blocks stay whole until backward. There each is freed when its own backward is over."

_WRONG_RULES: tuple[tuple[Callable[[StepCase], list[str]], str], ...] = (
    (_root_forgotten, "The root is freed too, as the last of all."),
    (
        _no_prefetch,
        "This is the order without prefetch. With it, a block in backward asks for the next one before it computes: the second "
        "gather comes before the first block is freed.",
    ),
    (_always_prefetch, "This is the order with prefetch. Without it, a block is gathered when its own backward begins."),
    (_root_freed, "Backward needs the root first of all, so the root stays whole after forward."),
    (_reshard_ignored, "With reshard=False the blocks stay whole after forward, so backward has nothing to gather."),
    (_gathered_twice, "What was not freed in forward is still whole in backward: there is nothing to gather."),
    (_kept_for_ever, _KEPT_FOR_EVER),
    (_all_kept_for_ever, _KEPT_FOR_EVER),
    (_forward_only, "A training step has a backward pass as well."),
    (_backward_like_forward, "Backward goes through the blocks from the last to the first."),
    (_all_freed_at_the_end, "A block is freed as soon as its own backward is over. Only two blocks are whole at a time."),
)
