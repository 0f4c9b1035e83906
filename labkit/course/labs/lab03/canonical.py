"""Exercise 2 of notebook 03: the name of a parameter without the names of its wrappers."""

from __future__ import annotations

from collections.abc import Callable

from labkit.course.labs.checks import ask, refuse
from labkit.errors import ExerciseError

_FSDP, _AC, _COMPILED, _DDP = "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"

# The name that a wrapped model reports, and the name in the model without wrappers.
NAMES: dict[str, str] = {
    "embed.weight": "embed.weight",
    f"{_FSDP}.embed.weight": "embed.weight",
    f"{_FSDP}.layers.0.{_FSDP}.attention.wq.weight": "layers.0.attention.wq.weight",
    f"{_FSDP}.layers.0.{_AC}.{_FSDP}.ffn_norm.weight": "layers.0.ffn_norm.weight",
    f"{_COMPILED}.layers.1.{_FSDP}.{_COMPILED}.{_AC}.attention.wo.weight": "layers.1.attention.wo.weight",
    f"{_DDP}.norm.weight": "norm.weight",
    f"{_COMPILED}.{_DDP}.{_FSDP}.head.weight": "head.weight",
    f"{_DDP}.{_COMPILED}.layers.2.{_AC}.feed_forward.w1.weight": "layers.2.feed_forward.w1.weight",
    "encoder.module.weight": "encoder.module.weight",
    f"{_FSDP}.encoder.{_FSDP}.module.bias": "encoder.module.bias",
    "module_list.0.weight": "module_list.0.weight",
    f"{_DDP}.module.weight": "module.weight",
    f"{_DDP}.my_module.{_AC}.before_orig_mod.weight": "my_module.before_orig_mod.weight",
}


def check_canonical(canonical: Callable[[str], str]) -> str:
    """Exercise 2: ``canonical(name)`` drops what FSDP1, DDP, activation checkpointing and ``torch.compile`` put into a name.

    Args:
        canonical: The learner's function.

    Returns:
        A line with the number of names.

    Raises:
        ExerciseError: Some names come out wrong; the message shows one that fits the hint, and how many are wrong.

    Ranks: controller.
    """
    answers = {}
    for name in NAMES:
        answer = ask(canonical, name)
        if not isinstance(answer, str):
            raise ExerciseError(f"canonical({name!r}) returned {type(answer).__name__}. It has to return the name as a string.")
        answers[name] = answer
    wrong = [name for name, answer in answers.items() if answer != NAMES[name]]
    if wrong:
        shown, hint = next(((name, hint) for shows, hint in _MISTAKES for name in wrong if shows(name, answers)), (wrong[0], _ELSE))
        refuse(f"{len(wrong)} of {len(NAMES)} names are wrong. {shown!r} became {answers[shown]!r}.", f"{NAMES[shown]!r}.", hint)
    return f"Solved: {len(NAMES)} names, all right."


Answers = dict[str, str]


def _still_in(part: str) -> Callable[[str, Answers], bool]:
    """Return a test of whether this wrapper is still in a name, at its beginning or further inside."""
    return lambda name, answers: part in answers[name].split(".") and part not in NAMES[name].split(".")


def _only_first_gone(name: str, answers: Answers) -> bool:
    """Return whether a wrapper is dropped at the beginning of a name but left further inside."""
    return answers[f"{_FSDP}.embed.weight"] == "embed.weight" and name.split(".").count(_FSDP) > 1 and _FSDP in answers[name]


# Each hint with a test of whether a wrong name shows its mistake, the most specific first.
_MISTAKES: list[tuple[Callable[[str, Answers], bool], str]] = [
    (lambda name, answers: len(set(answers.values())) == 1, "Every name came out the same."),
    (
        lambda name, answers: all(answer == given for given, answer in answers.items()),
        "Every name came out as it went in: nothing is dropped yet.",
    ),
    (
        lambda name, answers: not set(answers[name].split(".")) <= set(name.split(".")),
        "Cut at the dots and keep whole parts: your result has a part that is not in this name.",
    ),
    (
        lambda name, answers: (
            answers[name].split(".") == [part for part in NAMES[name].split(".") if part != "module"]
            and not name.startswith(f"{_DDP}.module")
        ),
        "A module of the model may be called module too. DDP wraps the whole model, so its part can only come before the model's.",
    ),
    (
        lambda name, answers: (
            name == f"{_DDP}.module.weight" and answers[name] == "weight" and answers["embed.weight"] == "embed.weight"
        ),
        "DDP wraps once: the second module is the model's own.",
    ),
    (
        _only_first_gone,
        "The outermost wrapper is gone, but the inner ones are still there: every block has one of its own.",
    ),
    (_still_in(_FSDP), "FSDP1 leaves _fsdp_wrapped_module, anywhere in a name."),
    (_still_in(_COMPILED), "torch.compile leaves _orig_mod, anywhere in a name."),
    (_still_in(_AC), "Activation checkpointing leaves _checkpoint_wrapped_module, anywhere in a name."),
    (
        lambda name, answers: answers[name].startswith(f"{_DDP}.") and answers[name] != name,
        "DDP's module is still there if another wrapper is around it or inside it.",
    ),
    (_still_in(_DDP), "DDP leaves module, before all parts of the model's own."),
    (
        lambda name, answers: not set(NAMES[name].split(".")) <= set(answers[name].split(".")),
        "A part of the model's own is gone. Only the wrappers' parts may go.",
    ),
]
_ELSE = "Go through the name part by part: which parts are a wrapper's, and which are the model's?"
