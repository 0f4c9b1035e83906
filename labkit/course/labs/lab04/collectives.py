"""Exercise 2 of notebook 04: the number of all-gathers and reduce-scatters in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NoReturn

from labkit.course.labs.checks import Pool, ask, hint_for, refuse
from labkit.course.labs.lab04.steps import Step, StepCase, recorded
from labkit.errors import ExerciseError

Counts = tuple[int, int]
Formula = Callable[[int, int, bool, bool, bool], Counts]
Rule = Callable[[StepCase, Counts], Counts]


def check_collectives(pool: Pool, collectives: Formula, *, timeout_s: float = 180.0) -> str:
    """Exercise 2: ``collectives(num_blocks, num_micro, reshard, sync_each, keep)`` returns the two counts of one step.

    Args:
        pool: The pool.
        collectives: Returns the number of all-gathers and the number of reduce-scatters.
        timeout_s: Seconds after which the counting counts as hung.

    Returns:
        A line with the number of steps that were counted.

    Raises:
        ExerciseError: A count differs, or ``collectives`` raises; the message shows the case and the difference.

    Ranks: controller. With one rank the runtime calls no collectives, so unshards are counted instead of gathers, and the rule
        gives the reductions. Blocks for ``timeout_s`` and a few seconds at most.
    """
    cases = [StepCase(3, True), StepCase(3, True, num_micro=2, sync_each=False), StepCase(3, True, num_micro=2, keep=True)]
    switches = product((1, 3), (True, False), (True, False), (False, True))
    cases += [StepCase(2, reshard, True, num_micro, sync_each, keep) for num_micro, reshard, sync_each, keep in switches]
    _answer(collectives, cases[0])  # before the long part, to see whether it is solved at all
    counted = [_counts(step) for step in recorded(pool, [_step_of(case) for case in cases], timeout_s=timeout_s)]
    for case, truth in zip(cases, counted, strict=True):
        answer = _answer(collectives, case)
        if answer != truth:
            _refuse_counts(case, answer, truth, collectives, list(zip(cases, counted, strict=True)))
    gathers, reductions = (sum(column) for column in zip(*counted, strict=True))
    if pool.world_size == 1:
        return (
            f"Solved: {len(cases)} kinds of steps, {gathers} unshards counted, all as predicted. One rank calls no collective: "
            f"the {reductions} reductions follow from the rule and were not counted."
        )
    return f"Solved: {len(cases)} kinds of steps, {gathers} gathers and {reductions} reductions counted, all as predicted."


def _counts(step: Step) -> Counts:
    return step.gathers, step.reductions


def _step_of(case: StepCase) -> StepCase:
    """Return an equivalent case: with one micro-batch, the switches between micro-batches do nothing."""
    return replace(case, sync_each=True, keep=False) if case.num_micro == 1 else case


def _answer(collectives: Formula, case: StepCase) -> Counts:
    arguments = (case.num_blocks, case.num_micro, case.reshard, case.sync_each, case.keep)
    return _as_counts(ask(collectives, *arguments, case=_setting(case)))


def _setting(case: StepCase) -> str:
    return (
        f"{_number(case.num_blocks, 'block')}, {_number(case.num_micro, 'micro-batch', 'es')}, reshard={case.reshard}, "
        f"sync_each={case.sync_each}, keep={case.keep}"
    )


def _number(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def _as_counts(answer: Any) -> Counts:
    try:
        gathers, reductions = answer
        return int(gathers), int(reductions)
    except (TypeError, ValueError):
        raise ExerciseError(
            f"collectives returned {answer!r}. It has to return two numbers: all-gathers, reduce-scatters."
        ) from None


def _refuse_counts(
    case: StepCase, answer: Counts, truth: Counts, collectives: Formula, known: list[tuple[StepCase, Counts]]
) -> NoReturn:
    names = ("all-gather", "reduce-scatter")
    off = [
        f"{_number(abs(said - right), name)} too {'many' if said > right else 'few'}"
        for said, right, name in zip(answer, truth, names, strict=True)
        if said != right
    ]
    refuse(
        f"{_setting(case)}: you predict {answer[0]}/{answer[1]}, {' and '.join(off)}.",
        f"{truth[0]}/{truth[1]}.",
        hint_for(known, [(partial(_follow, collectives, rule), hint) for rule, hint in _WRONG_RULES])
        or _hint_for_case(case, answer, truth),
    )


def _follow(collectives: Formula, rule: Rule, known: list[tuple[StepCase, Counts]]) -> bool:
    """Return whether a wrong rule gives these answers in every case; a single case fits several rules."""
    return all(_answer(collectives, case) == rule(case, truth) for case, truth in known)


def _hint_for_case(case: StepCase, answer: Counts, truth: Counts) -> str:
    if answer[1] != truth[1]:
        return "Each backward that reduces calls one reduce-scatter per group, including the root's."
    if case.keep and case.num_micro > 1:
        return "Blocks left whole by a backward are not gathered in the next forward. Backward gathers what forward has freed."
    return "Count the bars in the picture: every bar begins with an all-gather. How many in forward, how many in backward?"


def _no_root(case: StepCase, truth: Counts) -> Counts:
    gathers = truth[0] - (1 if case.keep else case.num_micro)
    return gathers, truth[1] // (case.num_blocks + 1) * case.num_blocks


def _root_regathered(case: StepCase, truth: Counts) -> Counts:
    return truth[0] + (case.num_micro if case.reshard else 0), truth[1]


def _sync_ignored(case: StepCase, truth: Counts) -> Counts:
    return truth[0], (case.num_blocks + 1) * case.num_micro


def _keep_ignored(case: StepCase, truth: Counts) -> Counts:
    per_micro = 1 + case.num_blocks * (2 if case.reshard else 1)
    return per_micro * case.num_micro, truth[1]


def _keep_is_all(case: StepCase, truth: Counts) -> Counts:
    per_micro = 1 + case.num_blocks * (2 if case.reshard else 1)
    return (per_micro if case.keep else per_micro * case.num_micro), truth[1]


def _one_micro_batch(case: StepCase, truth: Counts) -> Counts:
    return 1 + case.num_blocks * (2 if case.reshard else 1), case.num_blocks + 1


def _no_sync_saves_gathers(case: StepCase, truth: Counts) -> Counts:
    per_micro = 1 + case.num_blocks * (2 if case.reshard else 1)
    return (truth[0] if case.sync_each else per_micro), truth[1]


def _no_sync_saves_backward_gathers(case: StepCase, truth: Counts) -> Counts:
    saved = 0 if case.sync_each or not case.reshard else (case.num_micro - 1) * case.num_blocks
    return truth[0] - saved, truth[1]


def _swapped(case: StepCase, truth: Counts) -> Counts:
    return truth[1], truth[0]


def _reshard_ignored(case: StepCase, truth: Counts) -> Counts:
    return truth[0] + (0 if case.reshard else case.num_micro * case.num_blocks), truth[1]


def _never_regathered(case: StepCase, truth: Counts) -> Counts:
    return truth[0] - (case.num_micro * case.num_blocks if case.reshard else 0), truth[1]


_WRONG_RULES: tuple[tuple[Rule, str], ...] = (
    (_swapped, "These are the right numbers in the other order. All-gathers come first, then reduce-scatters."),
    (
        _reshard_ignored,
        "With reshard=False the blocks stay whole after forward, so backward has nothing to gather.",
    ),
    (_never_regathered, "With reshard=True forward frees the blocks, and backward gathers each of them again."),
    (_no_root, "The root is a group too: it is gathered once per forward and reduced once."),
    (_root_regathered, "The root stays whole after forward, so backward does not gather it again."),
    (_sync_ignored, "With sync_each=False only the last micro-batch reduces its gradients."),
    (_keep_ignored, "With keep=True the parameters are still whole when the next forward begins: it has nothing to gather."),
    (
        _keep_is_all,
        "keep=True spares the gathers of the next *forward* only. With reshard=True that forward frees the blocks as it goes, and "
        "its backward gathers them again.",
    ),
    (_one_micro_batch, "Every micro-batch runs forward and backward, and each of them needs whole parameters."),
    (_no_sync_saves_gathers, "Not reducing gradients spares reduce-scatters. The parameters are gathered as before."),
    (
        _no_sync_saves_backward_gathers,
        "Not reducing gradients spares reduce-scatters. Such a backward still needs whole parameters, which forward has freed.",
    ),
)
