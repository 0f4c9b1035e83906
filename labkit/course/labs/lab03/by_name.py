"""Exercise 3 of notebook 03: an optimizer's state under names instead of numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.course.labs.checks import ask, hint_for, refuse
from labkit.errors import ExerciseError

_STEPS_BEFORE, _STEPS_AFTER = 3, 3
# The order of the parameters in the old optimizer, which differs from the model's and has two groups.
OLD_ORDER = ("third", "first", "frozen", "second")
_NEW_ORDER = (("second", "frozen"), ("first", "third"))

ByName = Callable[[dict[str, Any], Sequence[str]], Mapping[str, Any]]


@dataclass(frozen=True)
class MovedState:
    """The result of moving a state with the learner's function.

    Attributes:
        answer: The function's result.
        right: The correct result.
        numbers_left: Whether there is still a number where a name should be.
        equal_steps: In how many later steps the weights equal those of the uninterrupted run.
        gap: The largest difference of a weight after these steps.
        stopped: The new optimizer's error; empty if it kept working.
    """

    answer: Mapping[str, Any]
    right: Mapping[str, Any]
    numbers_left: bool
    equal_steps: int = 0
    gap: float = 0.0
    stopped: str = ""


def check_by_name(by_name: ByName) -> str:
    """Exercise 3: ``by_name(state, names)`` returns an optimizer's state under names.

    The state of a trained optimizer goes through it into an optimizer with the same parameters and groups, but both in a different
    order. Then both optimizers train on.

    Args:
        by_name: The learner's function.

    Returns:
        A line with the steps that were equal.

    Raises:
        ExerciseError: The answer has the wrong form, the given state was changed, the new optimizer fails, a later step differs, or
            a group's option is lost.

    Ranks: controller; nothing runs on the ranks.
    """
    moved = _move(by_name)
    hint = hint_for(moved, _MISTAKES)
    if moved.numbers_left:
        refuse("a parameter is still a number in your result.", f"only names: {', '.join(OLD_ORDER)}.", hint)
    problem = _first_difference(moved.answer, moved.right)
    if moved.stopped:
        refuse(
            f"the new optimizer cannot go on from your result: {moved.stopped}; {problem}.", f"{_STEPS_AFTER} equal steps.", hint
        )
    if moved.equal_steps < _STEPS_AFTER:
        refuse(
            f"{moved.equal_steps} of {_STEPS_AFTER} later steps are equal; a weight is off by {moved.gap:.2g}; {problem}.",
            f"{_STEPS_AFTER} equal steps.",
            hint,
        )
    if problem:
        refuse(f"the later steps are equal, but {problem}.", "the whole state as it was, under names.", hint)
    return f"Solved: {_STEPS_AFTER} later steps equal bit for bit, with groups and parameters in another order."


def _move(by_name: ByName) -> MovedState:
    import torch

    model, optimizer = _start((("third", "first"), ("frozen", "second")))
    _train(model, optimizer, range(_STEPS_BEFORE))
    state = copy.deepcopy(optimizer.state_dict())  # the optimizer's own tensors change below
    kept = copy.deepcopy(state)
    answer: Any = ask(by_name, state, OLD_ORDER, case="the state of an optimizer with two groups")
    if _first_difference(state, kept):
        refuse(
            f"your function changed the state that it was given: {_first_difference(state, kept)}.",
            "the given state as it was.",
            "A group is a dict: {**group} makes a new one.",
        )
    _check_form(answer)
    right = {
        "state": {OLD_ORDER[number]: value for number, value in kept["state"].items()},
        "param_groups": [{**group, "params": [OLD_ORDER[number] for number in group["params"]]} for group in kept["param_groups"]],
    }
    names = [*answer["state"], *(name for group in answer["param_groups"] for name in group["params"])]
    if not all(isinstance(name, str) for name in names):
        return MovedState(answer, right, numbers_left=True)
    # Leave out the old optimizer's options: they have to come with the state.
    other, resumed = _start(_NEW_ORDER, with_options=False)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    equal_steps, gap = 0, 0.0
    try:
        _hand_over(copy.deepcopy(answer), resumed)
        for step in range(_STEPS_BEFORE, _STEPS_BEFORE + _STEPS_AFTER):
            for one, its in ((model, optimizer), (other, resumed)):
                _train(one, its, [step])
            gaps = [float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), other.parameters(), strict=True)]
            equal_steps += all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
            gap = max(gap, *gaps)
    except Exception as error:  # any error of AdamW when a part of its state is missing
        return MovedState(answer, right, numbers_left=False, stopped=f"{type(error).__name__}: {error}")
    return MovedState(answer, right, numbers_left=False, equal_steps=equal_steps, gap=gap)


def _check_form(answer: Any) -> None:
    """Refuse an answer that does not have the form ``{"state": {...}, "param_groups": [{"params": [...], ...}, ...]}``."""
    if not isinstance(answer, Mapping) or answer.keys() != {"state", "param_groups"}:
        raise ExerciseError("by_name has to return a dictionary with the two keys 'state' and 'param_groups'.")
    parts: list[tuple[str, Any, Any]] = [("'state'", answer["state"], Mapping), ("'param_groups'", answer["param_groups"], list)]
    if isinstance(answer["state"], Mapping):
        parts += [(f"the state of {name!r}", value, Mapping) for name, value in answer["state"].items()]
    for place, group in enumerate(answer["param_groups"] if isinstance(answer["param_groups"], list) else ()):
        parts.append((f"entry {place} of 'param_groups'", group, Mapping))
        if isinstance(group, Mapping):
            parts.append((f"'params' of group {place}", group.get("params"), list))
    for what, value, form in parts:
        if not isinstance(value, form):
            expected = "list" if form is list else "dictionary"
            raise ExerciseError(f"{what} is a {type(value).__name__} in your result. It has to be a {expected}.")


def _start(order: Sequence[Sequence[str]], *, with_options: bool = True) -> tuple[Any, Any]:
    """Make a model and its optimizer. All four parameters have one shape, so that a swap raises no error; one is frozen."""
    import torch

    generator = torch.Generator().manual_seed(3)
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.randn(2, 3, generator=generator)) for name in ("first", "second", "third", "frozen")}
    )
    model["frozen"].requires_grad_(requires_grad=False)
    options: dict[str, dict[str, Any]] = {"first": {"lr": 0.1, "weight_decay": 0.0}, "frozen": {"lr": 0.02, "betas": (0.8, 0.9)}}
    groups: list[dict[str, Any]] = []
    for names in order:
        chosen = next(options[name] for name in names if name in options)
        groups.append({"params": [model[name] for name in names], **(chosen if with_options else {})})
    return model, torch.optim.AdamW(groups, lr=0.5)


def _train(model: Any, optimizer: Any, steps: Sequence[int] | range) -> None:
    for step in steps:
        loss = sum(((number + 1.0) * model[name] - step).square().sum() for number, name in enumerate(("first", "second", "third")))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _hand_over(answer: Mapping[str, Any], optimizer: Any) -> None:
    """Load a state under names into an optimizer with the order `_NEW_ORDER`. Parameters not named in it start afresh."""
    names = [name for group in _NEW_ORDER for name in group]
    state = optimizer.state_dict()
    state["state"] = {names.index(name): value for name, value in answer["state"].items() if name in names}
    for group, members in zip(state["param_groups"], _NEW_ORDER, strict=True):
        partner: dict[str, Any] = next((saved for saved in answer["param_groups"] if set(saved["params"]) & set(members)), {})
        group.update({key: value for key, value in partner.items() if key != "params"})
    optimizer.load_state_dict(state)


def _first_difference(actual: Any, expected: Any, where: str = "") -> str:
    """Describe the first difference; empty if there is none."""
    import torch

    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            return f"{where or 'it'} is not a dictionary"
        if missing := [key for key in expected if key not in actual]:
            return f"{missing[0]!r} is missing in {where or 'it'}"
        if extra := [key for key in actual if key not in expected]:
            return f"{extra[0]!r} is not expected in {where or 'it'}"
        return next(filter(None, (_first_difference(actual[key], expected[key], f"{where}[{key!r}]") for key in expected)), "")
    if isinstance(expected, list):
        if not isinstance(actual, list | tuple) or len(actual) != len(expected):
            return f"{where} does not have {len(expected)} entries"
        pairs = enumerate(zip(actual, expected, strict=True))
        return next(filter(None, (_first_difference(a, b, f"{where}[{place}]") for place, (a, b) in pairs)), "")
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor):
            return f"{where} is a {type(actual).__name__} instead of a tensor"
        if actual.dtype != expected.dtype:
            return f"{where} is {actual.dtype} instead of {expected.dtype}"
        return "" if torch.equal(actual, expected) else f"{where} has other values"
    same = type(actual) is type(expected) and actual == expected
    return "" if same else f"{where} is {actual!r} instead of {expected!r}"


def _groups(moved: MovedState) -> list[list[Any]]:
    return [list(group["params"]) for group in moved.answer["param_groups"]]


def _lost_options(moved: MovedState) -> bool:
    return any(group.keys() - answer.keys() for answer, group in _pairs(moved))


def _pairs(moved: MovedState) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the answer's groups paired with the right ones; there are equally many."""
    return zip(moved.answer["param_groups"], moved.right["param_groups"], strict=True)


def _moments(moved: MovedState) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the answer's states paired with the right ones; their names are equal."""
    return ((moved.answer["state"][name], value) for name, value in moved.right["state"].items())


def _other_dtype(moved: MovedState) -> bool:
    return any(
        getattr(answer.get(key), "dtype", None) not in (None, value.dtype)
        for answer, right in _moments(moved)
        for key, value in right.items()
    )


_RIGHT_GROUPS = [["third", "first"], ["frozen", "second"]]
_MISTAKES: list[tuple[Callable[[MovedState], bool], str]] = [
    (lambda moved: moved.numbers_left, "Numbers are in two places: as keys of state, and in the params of each group."),
    (lambda moved: not moved.answer["state"], "The state is empty: the moments and the step counts are all in there."),
    (
        lambda moved: len(_groups(moved)) != len(_RIGHT_GROUPS),
        "The old optimizer has two groups, each with options of its own. Keep both.",
    ),
    (
        lambda moved: _groups(moved) == _RIGHT_GROUPS[::-1],
        "The groups are in another order than in the old state. Keep their order.",
    ),
    (
        lambda moved: _groups(moved) == [["third", "first"], ["third", "first"]],
        "You count from 0 in each group. The numbers go through all groups: the second one has 2 and 3.",
    ),
    (
        lambda moved: all("frozen" not in names for names in _groups(moved)),
        "The frozen parameter has no state, but it has a number and a group. When it thaws, its group has to know it.",
    ),
    (
        lambda moved: tuple(moved.answer["state"]) == OLD_ORDER[:3],
        "A frozen parameter has a number but no state. Use the numbers in state, not the count of entries before it.",
    ),
    (
        lambda moved: moved.answer["state"].keys() == set(OLD_ORDER),
        "The frozen parameter has no entry in the old state. Use the numbers that are in state.",
    ),
    (
        lambda moved: _groups(moved) != _RIGHT_GROUPS or moved.answer["state"].keys() != moved.right["state"].keys(),
        "names are in the order of the old optimizer, and so are the numbers: number 2 is names[2].",
    ),
    (_lost_options, "A group has more than its parameters: keep the learning rate, betas, weight decay and all the rest."),
    (
        lambda moved: any(float(answer.get("step", 0.0)) == 0 for answer, _ in _moments(moved)),
        "The step count is part of the state: Adam corrects its moments by it.",
    ),
    (
        lambda moved: any(right.keys() - answer.keys() for answer, right in _moments(moved)),
        "The state of a parameter has three entries: a step count and two moments. Keep all of them.",
    ),
    (_other_dtype, "Nothing is computed here, so nothing may be cast: the values stay as they are."),
    (
        lambda moved: bool(_first_difference(moved.answer["state"], moved.right["state"])),
        "The moments of a parameter are not its own. Which number belongs to which name?",
    ),
    (lambda moved: True, "A group has options that are not its own. Take them from the entry of the same group."),
]
