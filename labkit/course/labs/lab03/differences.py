"""Exercise 4 of notebook 03: a judge that finds every difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from labkit.course.labs.checks import ask, refuse, trying
from labkit.errors import ExerciseError

State = dict[str, Any]
Damage = Callable[[State], set[str]]
_NONE = "A missing name and a name that holds None are not the same: .get returns None for both."


def check_differences(differences: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterable[str]]) -> str:
    """Exercise 4: ``differences(old, new)`` names what is not the same in two flat states.

    Args:
        differences: The learner's function.

    Returns:
        A line with the number of kinds of damage.

    Raises:
        ExerciseError: An intact state is refused, or damage goes unnoticed or is blamed on the wrong name.

    Ranks: controller; nothing runs on the ranks.
    """
    intact = _asked(differences, _state(), _state(), "an intact state")
    if intact:
        refuse(
            f"an intact state: you report {_listed(intact)}.",
            "nothing: all bits are the same.",
            "A state may hold a NaN, and NaN == NaN is False. Two tensors are the same when their bits are."
            if intact == {"moments.nan"}
            else "The two states hold equal tensors in different memory. Compare values, not objects.",
        )
    for what, (damage, hint) in DAMAGES.items():
        new = _state()
        expected = damage(new)
        reported = _asked(differences, _state(), new, what)
        if reported != expected:
            refuse(f"{what}: you report {_listed(reported)}.", f"{_listed(expected)}.", hint)
    return f"Solved: {len(DAMAGES)} kinds of damage found by name, and nothing in an intact state."


def _asked(differences: Callable[..., Iterable[str]], old: State, new: State, what: str) -> set[str]:
    answer = ask(differences, old, new, case=what)
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise ExerciseError(f"{what}: differences returned {type(answer).__name__}. It has to return a set of names.")
    with trying(f"{what}: what differences returned", "a set of names."):
        return set(answer)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"


def _state() -> State:
    """Make the same state in new memory on each call."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return {
        "model.embed": torch.randn(4, 4, generator=generator),
        "model.head": torch.randn(4, 4, generator=generator),
        "model.norm": torch.ones(4),
        "model.half": torch.randn(3, generator=generator).bfloat16(),
        "model.zero": torch.zeros(3),
        "moments.nan": torch.tensor([1.0, float("nan"), 3.0]),
        "step": torch.tensor(7),
        "lr": 0.003,
        "betas": (0.9, 0.95),
        "amsgrad": False,
        "foreach": None,
    }


def _missing(state: State) -> set[str]:
    del state["model.norm"]
    return {"model.norm"}


def _extra(state: State) -> set[str]:
    state["model.bias"] = state["model.norm"].clone()
    return {"model.bias"}


def _last_bit(state: State) -> set[str]:
    import torch

    state["model.embed"][2, 1] = torch.nextafter(state["model.embed"][2, 1], torch.tensor(9.0))
    return {"model.embed"}


def _other_dtype(state: State) -> set[str]:
    state["model.norm"] = state["model.norm"].double()
    return {"model.norm"}


def _other_shape(state: State) -> set[str]:
    state["model.norm"] = state["model.norm"].view(1, 4)
    return {"model.norm"}


def _swapped(state: State) -> set[str]:
    state["model.embed"], state["model.head"] = state["model.head"], state["model.embed"]
    return {"model.embed", "model.head"}


def _moved_nan(state: State) -> set[str]:
    import torch

    state["moments.nan"] = torch.tensor([float("nan"), 1.0, 3.0])
    return {"moments.nan"}


def _other_rate(state: State) -> set[str]:
    state["lr"] = 0.001
    return {"lr"}


def _number(state: State) -> set[str]:
    state["step"] = 7
    return {"step"}


def _other_zero(state: State) -> set[str]:
    state["model.zero"] = -state["model.zero"]
    return {"model.zero"}


def _number_for_bool(state: State) -> set[str]:
    state["amsgrad"] = 0
    return {"amsgrad"}


def _missing_none(state: State) -> set[str]:
    del state["foreach"]
    return {"foreach"}


def _extra_none(state: State) -> set[str]:
    state["fused"] = None
    return {"fused"}


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a tensor is missing": (_missing, "Look at the names in both directions: what does the old state have that the new one lacks?"),
    "a tensor too many": (_extra, "Look at the names in both directions: what does the new state have that the old one lacks?"),
    "the last bit of one number": (
        _last_bit,
        "Nothing was computed on the way, so nothing may differ: a tolerance lets a wrong checkpoint pass.",
    ),
    "two tensors swapped": (_swapped, "Compare under the same name. Sets or sums of values do not see a swap."),
    "another dtype": (_other_dtype, "float64 has the same values but is not the same: the next load would cast it."),
    "another shape": (_other_shape, "== stretches a tensor of shape (1, 4) to (4,). Compare the shapes first."),
    "a NaN in another place": (_moved_nan, "It is not enough that both hold a NaN: it has to be in the same place."),
    "another learning rate": (_other_rate, "Plain values are part of the state too."),
    "a number instead of a tensor": (_number, "A tensor with 7 in it and the number 7 are of different kinds."),
    "another sign of zero": (_other_zero, "0.0 == -0.0, but their bits differ. Compare the bits."),
    "0 instead of False": (_number_for_bool, "0 == False, but they are of different kinds. Compare the types too."),
    "a None is missing": (_missing_none, _NONE),
    "a None too many": (_extra_none, _NONE),
}
