"""The hint for a wrong answer to exercise 1 of notebook 05, found by the known mistake that gives the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labkit.course.labs.lab05.owner_layouts import OwnerCase, Shape


def hint_for_answers(case: OwnerCase, answers: dict[Shape, set[int]]) -> str:
    """Return the hint for the mistake that explains all answers for a layout, else a general hint."""
    for rule, hint in _WRONG_RULES:
        if answers == rule(case):
            return hint
    return "Take one axis after the other: which slice does it keep, and what is the element's index within that slice?"


def hint_for_error(error: BaseException | None) -> str:
    """Return the hint for an error of the learner's function; empty if it fits no known mistake."""
    if isinstance(error, IndexError | ZeroDivisionError):
        return (
            "An axis has len(mesh) or len(mesh[0]) places, and pieces are rounded up. If they are rounded down, there are too "
            "many, or empty ones, and the element lies after the last place."
        )
    return ""


def _by_rule(
    case: OwnerCase,
    *,
    order: Sequence[int] | None = None,
    swapped: bool = False,
    numbered: bool = False,
    one: bool = False,
    cut: _Cut | None = None,
    num: int | None = None,
) -> dict[Shape, set[int]]:
    """Return the answers of a solution that is right except for the mistakes described by the arguments."""
    shape, grid = case.shape, case.grid
    sizes = (len(grid), len(grid[0]))
    order = order or sorted((0, 1), key=lambda axis: case.splits[axis].strided)
    answers = {}
    for place in case.elements:
        index, left, at = list(place), list(shape), [-1, -1]
        for axis in order:
            dim = case.splits[axis].dim
            if dim is None:
                at[axis] = 0 if one else -1
                continue
            at[axis], index[dim], left[dim] = (cut or _rounded_up)(index[dim], left[dim], num or sizes[axis])
        answers[place] = {grid[i][j] for i in range(sizes[0]) for j in range(sizes[1]) if at[0] in (-1, i) and at[1] in (-1, j)}
    if swapped:
        flat = [rank for row in grid for rank in row]
        moved = {rank: flat[j * sizes[0] + i] for i, row in enumerate(grid) for j, rank in enumerate(row)}
        answers = {place: {moved[rank] for rank in ranks} for place, ranks in answers.items()}
    if numbered:
        moved = {rank: row * sizes[1] + column for row, ranks in enumerate(grid) for column, rank in enumerate(ranks)}
        answers = {place: {moved[rank] for rank in ranks} for place, ranks in answers.items()}
    return answers


# Maps an index, a length and a number of pieces to the piece, the index in it, and its length.
_Cut = Callable[[int, int, int], tuple[int, int, int]]


def _in_pieces_of(piece: int, index: int, length: int, num: int) -> tuple[int, int, int]:
    at = min(index // piece, num - 1)
    return at, index - at * piece, min(piece, length - at * piece)


def _rounded_up(index: int, length: int, num: int) -> tuple[int, int, int]:
    return _in_pieces_of(-(-length // num), index, length, num)


def _never_short(index: int, length: int, num: int) -> tuple[int, int, int]:
    piece = -(-length // num)
    return index // piece, index % piece, piece


def _never_smaller(index: int, length: int, num: int) -> tuple[int, int, int]:
    piece = -(-length // num)
    return index // piece, index % piece, length


def _rounded_down(index: int, length: int, num: int) -> tuple[int, int, int]:
    return _in_pieces_of(max(length // num, 1), index, length, num)


def _interleaved(index: int, length: int, num: int) -> tuple[int, int, int]:
    at = index % num
    return at, index // num, len(range(at, length, num))


def _balanced(index: int, length: int, num: int) -> tuple[int, int, int]:
    """Cut as ``torch.tensor_split`` does: sizes differ by at most one, the larger ones first."""
    small, num_large = divmod(length, num)
    for at in range(num):
        size = small + (at < num_large)
        if index < size:
            return at, index, size
        index -= size
    raise AssertionError("the index lies after the last piece")


_Rule = Callable[[OwnerCase], dict[Shape, set[int]]]
_WRONG_RULES: tuple[tuple[_Rule, str], ...] = (
    (
        lambda case: _by_rule(case, order=(0, 1)),
        "You apply the axes from left to right. A strided axis comes last: the other axis has cut the rows before it.",
    ),
    (
        lambda case: _by_rule(case, order=(1, 0)),
        "You let the second axis cut first. That is right only if the first axis is strided; else they cut from left to right.",
    ),
    (
        lambda case: _by_rule(case, one=True),
        "If an axis copies, every place on it holds the element. You name only one of them.",
    ),
    (
        lambda case: _by_rule(case, cut=_rounded_down),
        "You round the size of a piece down. Pieces are rounded up, as in lab 01; the last ones may be short or empty.",
    ),
    (
        lambda case: _by_rule(case, cut=_interleaved),
        "You deal the elements out in turn. A piece is a block of neighbours: the first rows go to place 0, the next to place 1.",
    ),
    (
        lambda case: _by_rule(case, cut=_balanced),
        "You make the pieces as equal as they can be. As in lab 01 each is as large as the first, until nothing is left.",
    ),
    (
        lambda case: _by_rule(case, cut=_never_short),
        "You treat every piece as a full one. The last piece may be shorter, and the next axis cuts what it really holds.",
    ),
    (
        lambda case: _by_rule(case, cut=_never_smaller),
        "The next axis cuts the slice that is left, not the whole dim again: go on with the size of that slice.",
    ),
    (
        lambda case: _by_rule(case, num=2),
        "You cut into two pieces on each axis. The first axis makes len(mesh) pieces, the second len(mesh[0]).",
    ),
    (
        lambda case: _by_rule(case, numbered=True),
        "You number the ranks row by row. This mesh has another order: mesh[i][j] is the rank at a place.",
    ),
    (
        lambda case: _by_rule(case, swapped=True),
        "You read the mesh along the wrong axis: mesh[i][j] is place i on the first axis and place j on the second.",
    ),
)
