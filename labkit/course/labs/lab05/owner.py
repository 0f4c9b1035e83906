"""Exercise 1 of notebook 05: the ranks that hold an element of a tensor that two mesh axes cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NoReturn

from labkit.base.plain_text import format_ranks
from labkit.course.labs.checks import Pool, ask, refuse
from labkit.course.labs.lab05.owner_layouts import Grid, OwnerCase, Shape, pretended_cases, real_cases
from labkit.course.labs.lab05.owner_mistakes import hint_for_answers, hint_for_error
from labkit.errors import ExerciseError
from labkit.spmd.shards.layouts import Split

Owner = Callable[[int, int, Shape, Grid, Sequence[Split]], Iterable[int]]


def check_owner(pool: Pool, owner: Owner) -> str:
    """Exercise 1: ``owner(row, col, shape, mesh, splits)`` returns the ranks that hold one element.

    The answers are compared with real DTensors on this pool and, for larger meshes, with torch's own arithmetic for DTensors. Sizes
    that do not divide evenly are included, except when TP cuts rows before FSDP: there torch's arithmetic misplaces some rows, see
    `labkit.spmd.shards.tensor_parallel.lint_plan`.

    Args:
        pool: The pool.
        owner: Takes row, column, shape, the mesh as nested tuples of ranks, and one `Split` per axis; returns a set of ranks.

    Returns:
        A line with the number of answers.

    Raises:
        ExerciseError: An answer is wrong; the message shows one element of one layout.

    Ranks: controller.
    """
    real, pretended = real_cases(pool), pretended_cases(pool)
    num_answers = 0
    for case in [*real, *pretended]:
        answers = {place: _as_ranks(_asked(owner, place, case)) for place in case.elements}
        wrong = [place for place, said in answers.items() if said != case.owners(*place)]
        if wrong:
            _refuse_owner(case, answers, wrong)
        num_answers += len(answers)
    num_real = sum(len(case.elements) for case in real)
    right = f"{num_answers:,} answers for {len(real) + len(pretended)} layouts, all right"
    return f"Solved: {right}; {num_real} of them are for real DTensors on this pool."


def _asked(owner: Owner, place: Shape, case: OwnerCase) -> Any:
    try:
        return ask(owner, *place, case.shape, case.grid, case.splits)
    except ExerciseError as error:
        if hint := hint_for_error(error.__cause__):
            raise ExerciseError(f"{error}\nHint: {hint}") from error.__cause__
        raise


def _as_ranks(answer: Any) -> set[int]:
    if not isinstance(answer, Set) or not all(isinstance(rank, int) for rank in answer):
        raise ExerciseError(f"owner returned {answer!r}. It has to return a set of ranks, even if only one rank holds it.")
    return set(answer)


def _refuse_owner(case: OwnerCase, answers: dict[Shape, set[int]], wrong: list[Shape]) -> NoReturn:
    place = wrong[0]
    layout = (
        f"{case.shape[0]} x {case.shape[1]}, mesh {case.grid}, first axis {_words(case.splits[0])}, second {_words(case.splits[1])}"
    )
    refuse(
        f"{layout}: {len(wrong)} of {len(answers)} answers are wrong. For element {place} you say {_named(answers[place])}.",
        f"{_named(case.owners(*place))} for element {place}.",
        hint_for_answers(case, answers),
    )


def _words(split: Split) -> str:
    if split.dim is None:
        return "copies"
    return ("cuts rows" if split.dim == 0 else "cuts columns") + (" (strided)" if split.strided else "")


def _named(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}" if ranks else "no rank"
