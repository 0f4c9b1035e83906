"""Exercise 1 of notebook 04: write down the order of the events."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NoReturn

from labkit.course.labs.checks import Pool, ask, hint_for, refuse
from labkit.course.labs.lab04.steps import StepCase, recorded
from labkit.errors import ExerciseError

EventOrder = Callable[[int, bool, bool], Sequence[str]]


def check_event_order(pool: Pool, event_order: EventOrder, *, timeout_s: float = 120.0) -> str:
    """Exercise 1: ``event_order(num_blocks, reshard, prefetch)`` predicts the events of one training step.

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
    _answer(event_order, cases[0])  # before the long part, to see whether it is solved at all
    orders = [list(step.order) for step in recorded(pool, cases, timeout_s=timeout_s)]
    num_events = 0
    for case, truth in zip(cases, orders, strict=True):
        answer = _answer(event_order, case)
        if answer != truth:
            _refuse_order(case, answer, truth)
        num_events += len(truth)
    ranks = f"{pool.world_size} rank{'s' if pool.world_size > 1 else ''}"
    return f"Solved: {len(cases)} orders with {num_events} events together, equal to what {ranks} recorded."


def _answer(event_order: EventOrder, case: StepCase) -> list[str]:
    return _as_texts(ask(event_order, case.num_blocks, case.reshard, case.prefetch, case=_setting(case)))


def _setting(case: StepCase) -> str:
    return f"{case.num_blocks} block{'s' if case.num_blocks > 1 else ''}, reshard={case.reshard}, prefetch={case.prefetch}"


def _as_texts(answer: Any) -> list[str]:
    if isinstance(answer, str) or not isinstance(answer, Sequence) or not all(isinstance(text, str) for text in answer):
        raise ExerciseError(f"event_order returned {answer!r}. It has to return a list of texts such as 'U root' and 'R 0'.")
    return [" ".join(text.split()) for text in answer]


def _refuse_order(case: StepCase, answer: list[str], truth: list[str]) -> NoReturn:
    place = next((i for i, (a, b) in enumerate(zip(answer, truth, strict=False)) if a != b), min(len(answer), len(truth)))
    if place < len(answer):
        said = f"number {place + 1} in your list is {answer[place]!r} ({' '.join(answer[max(0, place - 2) : place + 3])})"
    else:
        said = f"your list has only {len(answer)} of {len(truth)} events"
    wanted = f"{truth[place]!r} comes there." if place < len(truth) else f"nothing comes there, the step has {len(truth)} events."
    mistakes = [(partial(applies, case), hint) for applies, hint in _MISTAKES]
    hint = hint_for(answer, mistakes, "Compare with the picture: which bar begins first, and which one ends first?")
    refuse(f"{_setting(case)}: {said}.", wanted, hint)


# Mistakes by what is in the list ----------------------------------------------------------------------------------------


def _is_empty(case: StepCase, answer: list[str]) -> bool:
    return not answer


def _has_long_names(case: StepCase, answer: list[str]) -> bool:
    return not all(re.fullmatch(r"[UR] (root|-?\d+)", text) for text in answer)


def _has_no_such_block(case: StepCase, answer: list[str]) -> bool:
    return not {text.split()[1] for text in answer} <= {"root", *map(str, range(case.num_blocks))}


def _keeps_for_ever(case: StepCase, answer: list[str]) -> bool:
    return not case.reshard and answer in (_forward(case), [*_forward(case), "R root"])


def _frees_nothing(case: StepCase, answer: list[str]) -> bool:
    return not any(text.startswith("R") for text in answer)


def _frees_root_early(case: StepCase, answer: list[str]) -> bool:
    return "R root" in answer[:-1]


def _gathers_twice(case: StepCase, answer: list[str]) -> bool:
    return _repeats(answer, "U")


def _frees_twice(case: StepCase, answer: list[str]) -> bool:
    return _repeats(answer, "R")


def _repeats(answer: list[str], letter: str) -> bool:
    """Return whether a block is gathered while whole, or freed while not whole."""
    last: dict[str, str] = {}
    for text in answer:
        what, block = text.split()
        if what == letter and last.get(block, "R") == letter:
            return True
        last[block] = what
    return False


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


def _forward_only(case: StepCase) -> list[str]:
    return _forward(case)


def _backward_like_forward(case: StepCase) -> list[str]:
    events = [event for block in range(case.num_blocks) for event in ((f"U {block}",) if case.reshard else ()) + (f"R {block}",)]
    return [*_forward(case), *events, "R root"]


def _all_freed_at_the_end(case: StepCase) -> list[str]:
    blocks = [f"U {block}" for block in reversed(range(case.num_blocks))] if case.reshard else []
    return [*_forward(case), *blocks, *(f"R {block}" for block in reversed(range(case.num_blocks))), "R root"]


_WRONG_ORDERS: tuple[tuple[Callable[[StepCase], list[str]], str], ...] = (
    (_root_forgotten, "The root is freed too, last of all."),
    (
        _no_prefetch,
        "This is the order without prefetch. With it, a block in backward asks for the next one before it computes: the second "
        "gather comes before the first block is freed.",
    ),
    (_always_prefetch, "This is the order with prefetch. Without it, a block is gathered when its own backward begins."),
    (_root_freed, "Backward needs the root first of all, so the root stays whole after forward."),
    (_reshard_ignored, "With reshard=False the blocks stay whole after forward, so backward has nothing to gather."),
    (_gathered_twice, "Blocks that were not freed in forward are still whole in backward: there is nothing to gather."),
    (_forward_only, "A training step has a backward pass as well."),
    (_backward_like_forward, "Backward goes through the blocks from the last to the first."),
    (_all_freed_at_the_end, "A block is freed as soon as its own backward is over. Only two blocks are whole at a time."),
)


def _is_order(order: Callable[[StepCase], list[str]], case: StepCase, answer: list[str]) -> bool:
    return answer == order(case)


_MISTAKES: tuple[tuple[Callable[[StepCase, list[str]], bool], str], ...] = (
    (_is_empty, "The list is empty. Begin with what forward needs first, and return the list."),
    (_has_long_names, "Write the short names, as printed above: 'U 0' and 'R root'."),
    (_has_no_such_block, "There is no such block. The first block has none before it to ask for, the last none after it."),
    (
        _keeps_for_ever,
        "With reshard=False the blocks stay whole until backward. There each is freed when its own backward is over.",
    ),
    *((partial(_is_order, order), hint) for order, hint in _WRONG_ORDERS),
    (_frees_nothing, "Your order frees nothing: free each block after its forward, or at the latest after its backward."),
    (
        _frees_root_early,
        "Backward needs the root first of all, so it stays whole after forward. It is freed last of all.",
    ),
    (_gathers_twice, "Your order gathers a block that is already whole: it has not been freed."),
    (_frees_twice, "Your order frees a block that is not whole: it was not gathered, or it was already freed."),
)
