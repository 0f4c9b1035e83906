"""Exercise 2 of notebook 03: the name of a parameter without the names of its wrappers."""

from __future__ import annotations

from collections.abc import Callable

from labkit.course.checks import hint_for, refuse
from labkit.errors import ExerciseError

_FSDP, _AC, _COMPILED, _DDP = "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"

# What a wrapped model reports, and the name in the model without wrappers.
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
        ExerciseError: A name comes out wrong; the message shows the first and how many there are.

    Ranks: controller.
    """
    answers = {}
    for name in NAMES:
        answer = canonical(name)
        if not isinstance(answer, str):
            raise ExerciseError(f"canonical({name!r}) returned {type(answer).__name__}. It has to return the name as a string.")
        answers[name] = answer
    wrong = [name for name, answer in answers.items() if answer != NAMES[name]]
    if wrong:
        first = wrong[0]
        refuse(
            f"{len(wrong)} of {len(NAMES)} names are wrong. {first!r} became {answers[first]!r}.",
            f"{NAMES[first]!r}.",
            hint_for(
                answers, _MISTAKES, "Go through the name part by part: which parts are a wrapper's, and which are the model's?"
            ),
        )
    return f"Solved: {len(NAMES)} names, all right."


def _left(part: str) -> Callable[[dict[str, str]], bool]:
    """Whether this wrapper is still in a name, at its beginning or inside."""
    return lambda answers: any(part in answer.split(".") and part not in NAMES[name].split(".") for name, answer in answers.items())


_MISTAKES: list[tuple[Callable[[dict[str, str]], bool], str]] = [
    (
        lambda answers: (
            answers["module_list.0.weight"] != "module_list.0.weight"
            or "my_module" not in answers[f"{_DDP}.my_module.{_AC}.before_orig_mod.weight"]
            or "before_orig_mod" not in answers[f"{_DDP}.my_module.{_AC}.before_orig_mod.weight"]
        ),
        "You cut a word out of the middle of a name: my_module and before_orig_mod are the model's own. Compare whole parts.",
    ),
    (
        lambda answers: answers["encoder.module.weight"] != "encoder.module.weight",
        "A module of the model may be called module too. DDP wraps the whole model, so its part can only come before the model's.",
    ),
    (
        lambda answers: answers[f"{_DDP}.module.weight"] == "weight",
        "DDP wraps once: the second module is the model's own.",
    ),
    (
        lambda answers: (
            answers[f"{_FSDP}.embed.weight"] == "embed.weight"
            and answers[f"{_FSDP}.layers.0.{_FSDP}.attention.wq.weight"] != "layers.0.attention.wq.weight"
        ),
        "The outermost wrapper is gone, those further in are still there: every block has one of its own.",
    ),
    (_left(_COMPILED), "torch.compile leaves _orig_mod, anywhere in a name."),
    (_left(_AC), "Activation checkpointing leaves _checkpoint_wrapped_module, anywhere in a name."),
    (_left(_DDP), "The module of DDP is still there where another wrapper stands around it or within it."),
]
