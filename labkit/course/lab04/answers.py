"""What a learner's function answers for one case, and which case it was where it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from labkit.errors import ExerciseError

T = TypeVar("T")


def answer_to(setting: str, function: Callable[[], T], name: str) -> T:
    """Call a learner's function for one case.

    Args:
        setting: The case, in words.
        function: Calls it with the case's arguments.
        name: How the learner's function is called.

    Raises:
        ExerciseError: It is still a hole, or it raised. The message names the case; the learner's own traceback stands above it.

    Ranks: controller.
    """
    try:
        return function()
    except NotImplementedError:
        raise ExerciseError(f"{name} is not solved yet. Fill in the exercise's cell and run it again.") from None
    except Exception as error:
        raise ExerciseError(f"{setting}: {name} raised {type(error).__name__}: {error}".rstrip(": ")) from error
