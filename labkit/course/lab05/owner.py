"""Exercise 1 of notebook 05: which ranks hold an element of a tensor that two mesh axes cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

from labkit.course.checks import Pool, from_cell, refuse
from labkit.errors import ExerciseError
from labkit.ranks import format_ranks
from labkit.spmd.layouts import Split, splits_of

Shape = tuple[int, int]
Grid = tuple[tuple[int, ...], ...]
Owner = Callable[[int, int, Shape, Grid, Sequence[Split]], Iterable[int]]

COPY, ROWS, COLUMNS, ROWS_STRIDED = Split(None), Split(0), Split(1), Split(0, strided=True)
_PRETENDED_GRIDS = ((2, 2), (2, 3), (3, 2), (1, 4))
_SHAPES: tuple[Shape, ...] = ((6, 4), (12, 5), (7, 5), (3, 2))


@dataclass(frozen=True)
class Case:
    """A layout and the truth about it.

    Attributes:
        shape: Rows and columns of the tensor.
        grid: The ranks of the mesh, one tuple per place on its first axis.
        splits: What each axis does.
        boxes: Per rank its first row and column, and its numbers of rows and columns.
    """

    shape: Shape
    grid: Grid
    splits: tuple[Split, Split]
    boxes: dict[int, tuple[Shape, Shape]]

    def owners(self, row: int, col: int) -> set[int]:
        """The ranks that hold an element."""
        return {
            rank
            for rank, ((top, left), (rows, cols)) in self.boxes.items()
            if top <= row < top + rows and left <= col < left + cols
        }

    @property
    def elements(self) -> list[Shape]:
        """All places of the tensor."""
        return list(product(range(self.shape[0]), range(self.shape[1])))


def check_owner(pool: Pool, owner: Owner) -> str:
    """Exercise 1: ``owner(row, col, shape, mesh, splits)`` returns the ranks that hold one element.

    The answers are compared with real DTensors on this pool, and on larger meshes with the arithmetic that torch does for a
    DTensor. Sizes that do not divide are among them, except where TP cuts rows before FSDP: TP wants sizes that divide.

    Args:
        pool: The pool.
        owner: Takes the place, the shape, the mesh as nested tuples of ranks, and one `Split` per axis. Returns a set of ranks.

    Returns:
        A line with the number of answers.

    Raises:
        ExerciseError: An answer is wrong; the message shows one element of one layout.

    Ranks: controller.
    """
    real = pool.run(_real_cases)
    pretended: list[Case] = pool.run(_pretended_cases, ranks=[0])[0]
    cases = [*_merged(real), *pretended]
    num_answers = 0
    for case in cases:
        answers = {place: _as_ranks(owner(*place, case.shape, case.grid, case.splits)) for place in case.elements}
        wrong = [place for place, said in answers.items() if said != case.owners(*place)]
        if wrong:
            _refuse_owner(case, answers, wrong)
        num_answers += len(answers)
    num_real = sum(len(case.elements) for case in cases[: len(cases) - len(pretended)])
    right = f"{num_answers:,} answers for {len(cases)} layouts, all right"
    return f"Solved: {right}; {num_real} of them are for real DTensors on this pool."


def _as_ranks(answer: Any) -> set[int]:
    try:
        return {int(rank) for rank in answer}
    except (TypeError, ValueError):
        raise ExerciseError(f"owner returned {answer!r}. It has to return a set of ranks, also where one rank holds it.") from None


def _refuse_owner(case: Case, answers: dict[Shape, set[int]], wrong: list[Shape]) -> NoReturn:
    place = wrong[0]
    layout = (
        f"{case.shape[0]} x {case.shape[1]}, mesh {case.grid}, first axis {_words(case.splits[0])}, second {_words(case.splits[1])}"
    )
    refuse(
        f"{layout}: {len(wrong)} of {len(answers)} answers are wrong. For element {place} you say {_named(answers[place])}.",
        f"{_named(case.owners(*place))} for element {place}.",
        _hint(case, answers),
    )


def _hint(case: Case, answers: dict[Shape, set[int]]) -> str:
    for rule, hint in _WRONG_RULES:
        if answers == rule(case):
            return hint
    return "Take one axis after the other: which slice does it keep, and what is the element's index within that slice?"


def _words(split: Split) -> str:
    if split.dim is None:
        return "copies"
    return ("cuts rows" if split.dim == 0 else "cuts columns") + (" (strided)" if split.strided else "")


def _named(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}" if ranks else "no rank"


# What a mistake would answer ------------------------------------------------------------------------------------------


def _by_rule(
    case: Case, *, order: Sequence[int] | None = None, swapped: bool = False, round_up: bool = True, one: bool = False
) -> dict[Shape, set[int]]:
    """The answers of a solution that is right but for what the flags say."""
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
            piece = -(-left[dim] // sizes[axis]) if round_up else max(left[dim] // sizes[axis], 1)
            at[axis] = min(index[dim] // piece, sizes[axis] - 1)
            index[dim] -= at[axis] * piece
            left[dim] = min(piece, left[dim] - at[axis] * piece)
        answers[place] = {grid[i][j] for i in range(sizes[0]) for j in range(sizes[1]) if at[0] in (-1, i) and at[1] in (-1, j)}
    if swapped:
        flat = [rank for row in grid for rank in row]
        moved = {rank: flat[j * sizes[0] + i] for i, row in enumerate(grid) for j, rank in enumerate(row)}
        answers = {place: {moved[rank] for rank in ranks} for place, ranks in answers.items()}
    return answers


_Rule = Callable[[Case], dict[Shape, set[int]]]
_WRONG_RULES: tuple[tuple[_Rule, str], ...] = (
    (
        lambda case: _by_rule(case, order=(0, 1)),
        "You apply the axes from left to right. A strided axis comes last: the other axis has cut the rows before it.",
    ),
    (
        lambda case: _by_rule(case, order=(1, 0)),
        "You let the second axis cut first. That is so only where the first axis is strided; else they cut from left to right.",
    ),
    (
        lambda case: _by_rule(case, one=True),
        "Where an axis copies, every place on it holds the element. You name one of them only.",
    ),
    (
        lambda case: _by_rule(case, round_up=False),
        "You round the size of a piece down. Pieces are rounded up, as in lab 01; the last ones may be short or empty.",
    ),
    (
        lambda case: _by_rule(case, swapped=True),
        "You read the mesh along the wrong axis: mesh[i][j] is place i on the first axis and place j on the second.",
    ),
)


# The truth ------------------------------------------------------------------------------------------------------------


def _pretended_cases() -> list[Case]:
    """Layouts on meshes larger than the pool, by torch's own arithmetic for one coordinate."""
    import torch.distributed.tensor as dt
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as local_part
    from torch.distributed.tensor.placement_types import _StridedShard

    cases = []
    for (down, across), shape in product(_PRETENDED_GRIDS, _SHAPES):
        grid = tuple(tuple(range(row * across, (row + 1) * across)) for row in range(down))
        for splits in [*product((COPY, ROWS, COLUMNS), repeat=2), (ROWS_STRIDED, ROWS)]:
            if splits[0].strided and shape[0] % across:
                continue
            placements: list[Any] = [
                dt.Replicate()
                if split.dim is None
                else _StridedShard(split.dim, split_factor=across)
                if split.strided
                else dt.Shard(split.dim)
                for split in splits
            ]
            boxes: dict[int, tuple[Shape, Shape]] = {}
            for i, j in product(range(down), range(across)):
                sizes, offsets = local_part(shape, (down, across), [i, j], placements)
                boxes[grid[i][j]] = ((offsets[0], offsets[1]), (sizes[0], sizes[1]))
            cases.append(Case(shape, grid, (splits[0], splits[1]), boxes))
    return cases


def _real_cases() -> list[Any]:
    """The records of real two-axis tensors on this rank: cut by hand, and by TP and FSDP2. With them the grid."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from labkit.spmd.shards import shard_table

    device, world_size = from_cell("device"), from_cell("world_size")
    across = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world_size // across, across), mesh_dim_names=("dp", "tp"))
    tensors: dict[str, Any] = {}
    for number, placements in enumerate(product((Replicate(), Shard(0), Shard(1)), repeat=2)):
        tensors[f"by hand {number}"] = distribute_tensor(torch.zeros(7, 5, device=device), mesh, list(placements))
    if across > 1:
        pair = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 3, bias=False)).to(device)
        parallelize_module(pair, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(pair, mesh=mesh["dp"])
        tensors |= dict(pair.named_parameters())
    return [mesh.mesh.tolist(), shard_table(tensors)]


def _merged(real: Any) -> list[Case]:
    grid = tuple(tuple(row) for row in real[0][0])
    cases = []
    for index, first in enumerate(real[0][1]):
        splits = splits_of(first.placements)
        boxes: dict[int, tuple[Shape, Shape]] = {}
        for rank, (_, records) in real.items():
            for chunk in records[index].chunks:
                boxes[rank] = ((chunk.offsets[0], chunk.offsets[1]), (chunk.sizes[0], chunk.sizes[1]))
        cases.append(Case((first.shape[0], first.shape[1]), grid, (splits[0], splits[1]), boxes))
    return cases
