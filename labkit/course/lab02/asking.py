"""Calls a learner's function so that what it raises is told as an exercise's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.errors import ExerciseError


def ask(function: Callable[..., Any], *args: Any) -> Any:
    """The learner's answer.

    Raises:
        ExerciseError: It is not solved yet, or raised; the message names the arguments.

    Ranks: controller or local.
    """
    name = getattr(function, "__name__", "the function")
    try:
        return function(*args)
    except NotImplementedError:
        raise ExerciseError(f"{name} is not solved yet. Fill in the exercise's cell and run it again.") from None
    except Exception as error:  # whatever a learner's code raises is shown to them
        given = ", ".join(map(repr, args))
        raise ExerciseError(
            f"{name}({given}) raised {type(error).__name__}: {error}. It has to return an answer; call it with these arguments "
            "to see where it fails."
        ) from error
