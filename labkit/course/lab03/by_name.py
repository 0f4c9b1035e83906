"""Exercise 3 of notebook 03: an optimizer's state under names in the place of numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.course.checks import hint_for, refuse
from labkit.errors import ExerciseError

_STEPS_BEFORE, _STEPS_AFTER = 3, 3
# The order in which the old optimizer had the parameters: not that of the model, and in two groups.
OLD_ORDER = ("third", "first", "frozen", "second")
_NEW_ORDER = (("second", "frozen"), ("first", "third"))

ByName = Callable[[dict[str, Any], Sequence[str]], Mapping[str, Any]]


@dataclass(frozen=True)
class Moved:
    """What came of moving a state by the learner's function.

    Attributes:
        answer: What the function returned.
        right: What it should have returned.
        numbers_left: Whether a number is still where a name should be.
        equal_steps: Later steps whose weights are those of the run that never stopped.
        gap: The largest difference of a weight after them.
    """

    answer: Mapping[str, Any]
    right: Mapping[str, Any]
    numbers_left: bool
    equal_steps: int
    gap: float


def check_by_name(by_name: ByName) -> str:
    """Exercise 3: ``by_name(state, names)`` gives an optimizer's state under names.

    The state of a trained optimizer goes through it into an optimizer that has the same parameters in another order and with
    its groups in another order. Both train on.

    Args:
        by_name: The learner's function.

    Returns:
        A line with the steps that were equal.

    Raises:
        ExerciseError: The given state was changed, a later step differs, or an option of a group is lost.

    Ranks: controller; nothing runs on the ranks.
    """
    moved = _move(by_name)
    hint = hint_for(moved, _MISTAKES, "Compare your result with get_optimizer_state_dict on the model that was trained.")
    if moved.numbers_left:
        refuse("a parameter is still a number in your result.", f"only names: {', '.join(OLD_ORDER)}.", hint)
    if moved.equal_steps < _STEPS_AFTER:
        refuse(
            f"{moved.equal_steps} of {_STEPS_AFTER} later steps are equal; a weight is off by {moved.gap:.2g}.",
            f"{_STEPS_AFTER} equal steps.",
            hint,
        )
    if problem := _first_difference(moved.answer, moved.right):
        refuse(f"the later steps are equal, but {problem}.", "the whole state as it was, under names.", hint)
    return f"Solved: {_STEPS_AFTER} later steps equal bit for bit, with groups and parameters in another order."


def _move(by_name: ByName) -> Moved:
    import torch

    model, optimizer = _start((("third", "first"), ("frozen", "second")))
    _train(model, optimizer, range(_STEPS_BEFORE))
    state = copy.deepcopy(optimizer.state_dict())  # the optimizer's own tensors move on below
    kept = copy.deepcopy(state)
    answer: Any = by_name(state, OLD_ORDER)
    if _first_difference(state, kept):
        refuse(
            f"your function changed the state that it was given: {_first_difference(state, kept)}.",
            "the given state as it was.",
            "A group is a dict: {**group} makes a new one.",
        )
    if not isinstance(answer, Mapping) or answer.keys() != {"state", "param_groups"}:
        raise ExerciseError("by_name has to return a dictionary with the two keys 'state' and 'param_groups'.")
    right = {
        "state": {OLD_ORDER[number]: value for number, value in kept["state"].items()},
        "param_groups": [{**group, "params": [OLD_ORDER[number] for number in group["params"]]} for group in kept["param_groups"]],
    }
    names = [*answer["state"], *(name for group in answer["param_groups"] for name in group.get("params", ()))]
    if not all(isinstance(name, str) for name in names):
        return Moved(answer, right, numbers_left=True, equal_steps=0, gap=0.0)
    other, resumed = _start(_NEW_ORDER)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    _hand_over(copy.deepcopy(answer), resumed)
    equal_steps, gap = 0, 0.0
    for step in range(_STEPS_BEFORE, _STEPS_BEFORE + _STEPS_AFTER):
        for one, its in ((model, optimizer), (other, resumed)):
            _train(one, its, [step])
        gaps = [float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), other.parameters(), strict=True)]
        equal_steps += all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        gap = max(gap, *gaps)
    return Moved(answer, right, numbers_left=False, equal_steps=equal_steps, gap=gap)


def _start(order: Sequence[Sequence[str]]) -> tuple[Any, Any]:
    """Four parameters of one shape, so that a swap raises nothing; one of them is frozen."""
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
        groups.append({"params": [model[name] for name in names], **chosen})
    return model, torch.optim.AdamW(groups, lr=0.5)


def _train(model: Any, optimizer: Any, steps: Sequence[int] | range) -> None:
    for step in steps:
        loss = sum(((number + 1.0) * model[name] - step).square().sum() for number, name in enumerate(("first", "second", "third")))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _hand_over(answer: Mapping[str, Any], optimizer: Any) -> None:
    """Load a state under names into an optimizer of the order `_NEW_ORDER`; what has no name there begins anew."""
    names = [name for group in _NEW_ORDER for name in group]
    state = optimizer.state_dict()
    state["state"] = {names.index(name): value for name, value in answer["state"].items() if name in names}
    for group, members in zip(state["param_groups"], _NEW_ORDER, strict=True):
        partner: dict[str, Any] = next(
            (saved for saved in answer["param_groups"] if set(saved.get("params", ())) & set(members)), {}
        )
        group.update({key: value for key, value in partner.items() if key != "params"})
    optimizer.load_state_dict(state)


def _first_difference(actual: Any, expected: Any, where: str = "") -> str:
    """What differs first, in words; empty when nothing does."""
    import torch

    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            return f"{where or 'it'} is no dictionary"
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
        same = isinstance(actual, torch.Tensor) and actual.dtype == expected.dtype and torch.equal(actual, expected)
    else:
        same = type(actual) is type(expected) and actual == expected
    return "" if same else f"{where} is {actual!r} in the place of {expected!r}"


def _groups(moved: Moved) -> list[list[Any]]:
    return [list(group.get("params", ())) for group in moved.answer["param_groups"]]


_RIGHT_GROUPS = [["third", "first"], ["frozen", "second"]]
_MISTAKES: list[tuple[Callable[[Moved], bool], str]] = [
    (lambda moved: moved.numbers_left, "Numbers stand in two places: as keys of state, and in the params of each group."),
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
        "A frozen parameter has a number and no state. Go by the numbers in state, not by how many entries came before.",
    ),
    (
        lambda moved: _groups(moved) != _RIGHT_GROUPS or moved.answer["state"].keys() != moved.right["state"].keys(),
        "names are in the order of the old optimizer, and so are the numbers: number 2 is names[2].",
    ),
    (
        lambda moved: any("betas" not in group or "lr" not in group for group in moved.answer["param_groups"]),
        "A group has more than its parameters: learning rate, betas, weight decay and all the rest go along.",
    ),
    (
        lambda moved: any("step" not in value or float(value["step"]) == 0 for value in moved.answer["state"].values()),
        "The step count is part of the state: Adam corrects its moments by it.",
    ),
    (
        lambda moved: bool(_first_difference(moved.answer["state"], moved.right["state"])),
        "The moments of a parameter are not its own. Which number belongs to which name?",
    ),
]
