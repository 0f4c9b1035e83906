"""Notebook 05's checks accept the notebook's own solutions and refuse plausible wrong answers, with a fitting hint."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import labkit
from labkit.course.labs import lab05
from labkit.errors import ExerciseError, RankFailedError
from labkit.spmd.shards.layouts import Split
from tests.matrix import matrix
from tests.notebooks import exercises
from tests.notebooks.exercises import exercise_cell

NOTEBOOK = "05_2d_state_dicts"
IMPORTS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
"""


@pytest.fixture(scope="module", params=matrix(4, 1, 2, 3))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        pool.run_cell(IMPORTS)
        yield pool


on_four = pytest.mark.parametrize("pool", [4], indirect=True)
on_two_and_four = pytest.mark.parametrize("pool", [2, 4], indirect=True)


def exercise(name: str) -> str:
    return exercise_cell(NOTEBOOK, f"def {name}(")


def defined_by(source: str, name: str) -> Any:
    return exercises.defined_by(source, name, torch=torch, ColwiseParallel=ColwiseParallel, RowwiseParallel=RowwiseParallel)


# Exercise 1 ----------------------------------------------------------------------------------------------------------

Grid = Sequence[Sequence[int]]
Owner = Callable[[int, int, tuple[int, int], Grid, Sequence[Split]], set[int]]


def test_the_notebook_s_owner_passes_and_real_tensors_are_among_the_answers(pool: labkit.WorkerPool) -> None:
    line = lab05.check_owner(pool, defined_by(exercise("owner"), "owner"))
    assert line.startswith("Solved: ")
    num_real = 9 * 35 + (24 + 18 if pool.world_size % 2 == 0 else 0)
    assert f"{num_real} of them are for real DTensors" in line


def solve(
    row: int,
    col: int,
    shape: tuple[int, int],
    mesh: Grid,
    splits: Sequence[Split],
    *,
    order: Callable[[Sequence[Split]], Sequence[int]] = lambda splits: sorted((0, 1), key=lambda axis: splits[axis].strided),
    up: bool = True,
    shrink: bool = True,
    short: bool = True,
    num_places: tuple[int, int] | None = None,
) -> list[list[int]]:
    """Places on both axes by a right or wrong rule, written differently from the notebook's solution."""
    index, left, num = [row, col], list(shape), num_places or (len(mesh), len(mesh[0]))
    places = [list(range(len(mesh))), list(range(len(mesh[0])))]
    for axis in order(splits):
        dim = splits[axis].dim
        if dim is None:
            continue
        size = -(-left[dim] // num[axis]) if up else max(left[dim] // num[axis], 1)
        at = min(index[dim] // size, num[axis] - 1)
        places[axis] = [at]
        index[dim] -= at * size
        if shrink:
            left[dim] = min(size, left[dim] - at * size) if short else size
    return places


def ranks_at(mesh: Grid, places: list[list[int]]) -> set[int]:
    return {mesh[i][j] for i in places[0] for j in places[1]}


def left_to_right(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    return ranks_at(mesh, solve(row, col, shape, mesh, splits, order=lambda splits: (0, 1)))


def rounded_down(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    return ranks_at(mesh, solve(row, col, shape, mesh, splits, up=False))


def one_copy(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    places = solve(row, col, shape, mesh, splits)
    return {mesh[places[0][0]][places[1][0]]}


def swapped_axes(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    places = solve(row, col, shape, mesh, splits)
    flat = [rank for line in mesh for rank in line]
    return {flat[j * len(mesh) + i] for i in places[0] for j in places[1]}


def whole_size_twice(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    return ranks_at(mesh, solve(row, col, shape, mesh, splits, shrink=False))


def full_pieces(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    return ranks_at(mesh, solve(row, col, shape, mesh, splits, short=False))


def always_two(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    return ranks_at(mesh, solve(row, col, shape, mesh, splits, num_places=(2, 2)))


def floor_without_a_limit(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    places = [list(range(len(mesh))), list(range(len(mesh[0])))]
    for axis, split in enumerate(splits):
        if split.dim is not None:
            places[axis] = [(row, col)[split.dim] // (shape[split.dim] // len(places[axis]))]
    return ranks_at(mesh, places)


def always_tp_first(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    return ranks_at(mesh, solve(row, col, shape, mesh, splits, order=lambda splits: (1, 0)))


def ignores_the_mesh(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    width = len(mesh[0])
    by_row = [[i * width + j for j in range(width)] for i in range(len(mesh))]
    return ranks_at(by_row, solve(row, col, shape, mesh, splits))


def reversed_where_any_is_strided(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
    order = (1, 0) if any(split.strided for split in splits) else (0, 1)
    return ranks_at(mesh, solve(row, col, shape, mesh, splits, order=lambda splits: order))


def by_pieces(find: Callable[[list[int], int], list[list[int]]]) -> Owner:
    """An owner that cuts lists of indices, by another rule than torch's."""

    def owner(row: int, col: int, shape: tuple[int, int], mesh: Grid, splits: Sequence[Split]) -> set[int]:
        left = [list(range(size)) for size in shape]
        places = [list(range(len(mesh))), list(range(len(mesh[0])))]
        for axis in sorted((0, 1), key=lambda axis: splits[axis].strided):
            dim = splits[axis].dim
            if dim is not None:
                pieces = find(left[dim], len(places[axis]))
                places[axis] = [at for at, piece in enumerate(pieces) if (row, col)[dim] in piece]
                left[dim] = pieces[places[axis][0]]
        return ranks_at(mesh, places)

    return owner


interleaved = by_pieces(lambda indices, num: [indices[at::num] for at in range(num)])
balanced = by_pieces(lambda indices, num: [part.tolist() for part in torch.tensor_split(torch.tensor(indices), num)])


@on_four
@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (left_to_right, "A strided axis comes last"),
        (rounded_down, "Pieces are rounded up"),
        (one_copy, "every place on it holds the element"),
        (swapped_axes, "mesh[i][j] is place i on the first axis"),
        (whole_size_twice, "not the whole dim again"),
        (full_pieces, "The last piece may be shorter"),
        (always_two, "You cut into two pieces on each axis"),
        (always_tp_first, "You let the second axis cut first"),
        (ignores_the_mesh, "mesh[i][j] is the rank at a place"),
        (reversed_where_any_is_strided, "You let the second axis cut first"),
        (interleaved, "A piece is a block of neighbours"),
        (balanced, "until nothing is left"),
    ],
)
def test_wrong_owners_are_refused_with_the_layout_and_a_hint(pool: labkit.WorkerPool, wrong: Owner, hint: str) -> None:
    with pytest.raises(ExerciseError, match="answers are wrong") as caught:
        lab05.check_owner(pool, wrong)
    assert hint in str(caught.value)
    assert "Target: " in str(caught.value)


@pytest.mark.parametrize("pool", [1], indirect=True)
@pytest.mark.parametrize("wrong", [left_to_right, rounded_down, one_copy, swapped_axes, whole_size_twice])
def test_one_rank_is_enough_to_find_a_wrong_owner_out(pool: labkit.WorkerPool, wrong: Owner) -> None:
    with pytest.raises(ExerciseError):
        lab05.check_owner(pool, wrong)


@on_four
@pytest.mark.parametrize("answer", [0, [0, 1], (0,), {0: 1}, {"0"}, None])
def test_an_answer_that_is_no_set_of_ranks_is_explained(pool: labkit.WorkerPool, answer: Any) -> None:
    with pytest.raises(ExerciseError, match="It has to return a set of ranks"):
        lab05.check_owner(pool, lambda *_: answer)


@on_four
def test_an_owner_that_asks_for_a_place_behind_the_last_one_gets_a_hint(pool: labkit.WorkerPool) -> None:
    with pytest.raises(ExerciseError, match="raised IndexError") as caught:
        lab05.check_owner(pool, floor_without_a_limit)
    assert "pieces are rounded up" in str(caught.value)


# Exercise 2 ----------------------------------------------------------------------------------------------------------


def lint_with(
    match: Callable[[str, str], bool],
    *,
    among: slice = slice(None),
    by_rows: Callable[[Any], bool] | None = None,
    sizes: bool = True,
) -> Callable[..., set[str]]:
    def lint(plan: dict[str, Any], model: torch.nn.Module, tp_size: int) -> set[str]:
        bad = set()
        for key, style in plan.items():
            found = [module for name, module in model.named_modules() if match(name, key)]
            if not found:
                bad.add(key)
                continue
            rows = by_rows(style) if by_rows else isinstance(style, ColwiseParallel)
            for module in found[among]:
                weight = getattr(module, "weight", None)
                if sizes and weight is not None and weight.shape[0 if rows else 1] % tp_size:
                    bad.add(key)
        return bad

    return lint


def by_level(name: str, key: str) -> bool:
    parts, patterns = name.split("."), key.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def by_parts(match: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    def matches(name: str, key: str) -> bool:
        parts, patterns = name.split("."), key.split(".")
        return len(parts) == len(patterns) and all(map(match, parts, patterns))

    return matches


star_or_equal = by_parts(lambda part, pattern: pattern in ("*", part))
part_of_it = by_parts(lambda part, pattern: fnmatchcase(part, f"*{pattern}*"))
begins_so = by_parts(lambda part, pattern: fnmatchcase(part, f"{pattern}*"))


def test_the_notebook_s_linter_passes() -> None:
    line = lab05.check_plan_linter(defined_by(exercise("lint"), "lint"))
    assert line == "Solved: 11 plans judged correctly, 9 of them bad."


@pytest.mark.parametrize(
    ("wrong", "case", "hint"),
    [
        (lint_with(lambda name, key: name == key), "the course's plan", "Do you handle a pattern such as layers.*?"),
        (lint_with(fnmatchcase), "skips a level", "a star stands for one name between dots"),
        (lint_with(lambda name, key: key.split(".")[-1] in name), "the course's plan|skips a level|too early", ""),
        (lint_with(by_level, sizes=False), "hidden size 90", "Column-parallel cuts the rows"),
        (lint_with(by_level, by_rows=lambda style: True), "hidden size 90|more columns than rows", "row-parallel"),
        (lint_with(by_level, by_rows=lambda style: not isinstance(style, ColwiseParallel)), "hidden size 90", "row-parallel"),
        (lint_with(by_level, among=slice(1)), "an odd last layer", "including the last"),
        (lint_with(by_level, among=slice(-1, None)), "an odd first layer", "including the first"),
        (lint_with(star_or_equal), "a set and a question mark", "A star is not the only pattern"),
        (lint_with(part_of_it), "a part of a name", "w is not wq"),
        (lint_with(begins_so), "a part of a name", "w is not wq"),
        (lambda plan, model, tp_size: set(), "a typo", "A key that names no module"),
    ],
    ids=[
        "exact_names",
        "star_over_dots",
        "last_part",
        "no_sizes",
        "always_rows",
        "styles_swapped",
        "first_match",
        "last_match",
        "star_or_equal",
        "part_of_a_name",
        "prefix",
        "nothing",
    ],
)
def test_wrong_linters_are_refused_with_the_plan_and_a_hint(wrong: Callable[..., set[str]], case: str, hint: str) -> None:
    with pytest.raises(ExerciseError, match=case) as caught:
        lab05.check_plan_linter(wrong)
    assert hint in str(caught.value)


@pytest.mark.parametrize("answer", [True, ["banana"], {"banana": 7}, "layers.*"])
def test_a_linter_that_returns_no_set_is_explained(answer: Any) -> None:
    with pytest.raises(ExerciseError, match="It has to return a set of keys"):
        lab05.check_plan_linter(lambda plan, model, tp_size: answer)


@pytest.mark.parametrize("answer", [{"banana", 7}, {torch.nn.Linear(2, 2)}, {0}, {None}], ids=["mixed", "modules", "zero", "none"])
def test_a_linter_that_returns_other_things_than_keys_is_explained(answer: Any) -> None:
    with pytest.raises(ExerciseError, match="It has to return keys of the plan"):
        lab05.check_plan_linter(lambda plan, model, tp_size: answer)


def test_a_linter_that_matches_names_of_another_length_gets_a_hint_and_a_call_that_works() -> None:
    def shorter(name: str, key: str) -> bool:
        return all(map(fnmatchcase, name.split("."), key.split(".")))

    def lint(plan: dict[str, Any], model: torch.nn.Module, tp_size: int) -> set[str]:
        found = {key: [module for name, module in model.named_modules() if shorter(name, key)] for key in plan}
        return {key for key, modules in found.items() if any(module.weight.shape[0] % tp_size for module in modules)}

    with pytest.raises(ExerciseError, match="has no attribute 'weight'") as caught:
        lab05.check_plan_linter(lint)
    assert "zip stops at the shorter" in str(caught.value)
    call = re.match(r"lint\(\*lab05.plan_case\(['\"](.+?)['\"]\)\): ", str(caught.value))
    assert call is not None
    with pytest.raises(AttributeError, match="has no attribute 'weight'"):
        lint(*lab05.plan_case(call[1]))


# Exercise 3 ----------------------------------------------------------------------------------------------------------


def pieces_of(folder: Path, name: str) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found = []
    for index, place in metadata.storage_data.items():
        if index.fqn == name:
            data = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
            found.append((tuple(index.offset), torch.load(io.BytesIO(data))))
    return found


def whole_of(folder: Path, name: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    entry: Any = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata[name]
    return torch.zeros(entry.size, dtype=dtype or entry.properties.dtype)


def in_rank_order(folder: Path, name: str) -> torch.Tensor:
    def rank_of(place: Any) -> int:
        return int(re.findall(r"\d+", place)[0])

    metadata = dcp.FileSystemReader(folder).read_metadata()
    places = sorted(
        ((place.relative_path, place.offset, place.length) for index, place in metadata.storage_data.items() if index.fqn == name),
        key=lambda place: rank_of(place[0]),
    )
    pieces = [torch.load(io.BytesIO((folder / path).read_bytes()[start : start + size])) for path, start, size in places]
    return torch.cat(pieces).reshape(whole_of(folder, name).shape)


def rows_only(folder: Path, name: str) -> torch.Tensor:
    whole = whole_of(folder, name)
    for offset, piece in pieces_of(folder, name):
        target = whole[offset[0] : offset[0] + piece.shape[0]]
        (target[..., : piece.shape[-1]] if piece.dim() == 2 else target).copy_(piece)
    return whole


def stacked_by_offset(folder: Path, name: str) -> torch.Tensor:
    return torch.cat([piece for _, piece in sorted(pieces_of(folder, name), key=lambda one: one[0])])


def always_float32(folder: Path, name: str) -> torch.Tensor:
    whole = whole_of(folder, name, dtype=torch.float32)
    for offset, piece in pieces_of(folder, name):
        whole[tuple(slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True))] = piece
    return whole


def first_file_only(folder: Path, name: str) -> torch.Tensor:
    whole = whole_of(folder, name)
    offset, piece = min(pieces_of(folder, name), key=lambda one: one[0])
    whole[tuple(slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True))] = piece
    return whole


def reading(start: bool = True, length: bool = True, named: Callable[[str, str], bool] = str.__eq__) -> Callable[..., torch.Tensor]:
    """A rebuild that is right except for the mistakes that the flags name."""

    def rebuild(folder: Path, name: str) -> torch.Tensor:
        whole = whole_of(folder, name)
        for index, place in dcp.FileSystemReader(folder).read_metadata().storage_data.items():
            if named(index.fqn, name):
                data = (folder / place.relative_path).read_bytes()[place.offset if start else 0 :]
                piece = torch.load(io.BytesIO(data[: place.length] if length else data))
                whole[tuple(slice(at, at + size) for at, size in zip(index.offset, piece.shape, strict=True))] = piece
        return whole

    return rebuild


def only_rows_as_a_slice(folder: Path, name: str) -> torch.Tensor:
    whole = whole_of(folder, name)
    for offset, piece in pieces_of(folder, name):
        whole[offset[0] : offset[0] + piece.shape[0]] = piece
    return whole


def always_two_slices(folder: Path, name: str) -> torch.Tensor:
    whole = whole_of(folder, name)
    for offset, piece in pieces_of(folder, name):
        whole[offset[0] : offset[0] + piece.shape[0], offset[1] : offset[1] + piece.shape[1]] = piece
    return whole


def transposed(folder: Path, name: str) -> torch.Tensor:
    return reading()(folder, name).T.contiguous()


def read_by_dcp(folder: Path, name: str) -> torch.Tensor:
    whole = whole_of(folder, name)
    dcp.load({name: whole}, checkpoint_id=folder, no_dist=True)
    return whole


def not_written(folder: Path, name: str) -> torch.Tensor:
    raise NotImplementedError


def test_the_notebook_s_rebuild_passes(pool: labkit.WorkerPool) -> None:
    line = lab05.check_rebuild(pool, defined_by(exercise("rebuild"), "rebuild"))
    assert line.startswith("Solved: 8 tensors rebuilt from ")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@on_four
@pytest.mark.parametrize(
    ("wrong", "said", "hint"),
    [
        (in_rank_order, "elements are wrong", "Put a piece where index.offset says"),
        (rows_only, "elements are wrong", "Some elements are zero"),
        (stacked_by_offset, "has the shape", "index.offset has one number per dim"),
        (always_float32, "torch.float32", "properties.dtype says what was saved"),
        (first_file_only, "elements are wrong", "pieces were left out"),
        (only_rows_as_a_slice, "rebuild raised RuntimeError", "Some tensors are cut by columns too"),
        (always_two_slices, "one dim: rebuild raised IndexError", "make a slice for each dim that there is"),
        (reading(start=False), "column-parallel", "place.offset"),
        (reading(length=False), "uneven too: rebuild raised", "place.length"),
        (reading(named=str.startswith), "uneven: rebuild raised", "index.fqn has to be equal"),
        (reading(named=str.endswith), "uneven: rebuild raised", "index.fqn has to be equal"),
        (reading(named=str.__contains__), "uneven: rebuild raised", "index.fqn has to be equal"),
        (transposed, "has the shape", "Rows and columns have changed places"),
        (read_by_dcp, "DCP has read the data", "Leave dcp.load out"),
        (not_written, "not_written is not solved yet", ""),
    ],
)
def test_wrong_rebuilds_are_refused_with_a_hint(
    pool: labkit.WorkerPool, wrong: Callable[[Path, str], torch.Tensor], said: str, hint: str
) -> None:
    with pytest.raises(ExerciseError, match=said) as caught:
        lab05.check_rebuild(pool, wrong)
    assert hint in str(caught.value)


@on_four
def test_a_rebuild_that_raises_is_told_with_a_call_that_works(pool: labkit.WorkerPool, tmp_path: Path) -> None:
    def rebuild(folder: Path, name: str) -> torch.Tensor:
        return len(folder)  # type: ignore[arg-type,return-value]

    call = "rebuild(lab05.save_tensors(pool, folder / 'tensors'), 'column-parallel')"
    with pytest.raises(ExerciseError, match=re.escape(f"{call}: rebuild raised TypeError")):
        lab05.check_rebuild(pool, rebuild)
    folder = lab05.save_tensors(pool, tmp_path / "tensors")
    assert defined_by(exercise("rebuild"), "rebuild")(folder, "column-parallel").shape == (6, 4)


# Exercise 4 ----------------------------------------------------------------------------------------------------------

BY_HAND = """
def grad_norm(model):
    total = 0.0
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None:
            square = grad.to_local().square().sum()
            for axis, placement in enumerate(grad.placements):
                if not isinstance(placement, Replicate):
                    dist.all_reduce(square, group=grad.device_mesh.get_group(axis))
            total = total + square
    return total.sqrt()
"""
ONE_RESULT = """
def grad_norm(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    {body}
"""
LOCAL = "return nn.utils.get_total_norm([grad.to_local() for grad in grads])"
COPIES = "total = sum(grad.to_local().square().sum() for grad in grads); dist.all_reduce(total); return total.sqrt()"
SUM_OF_NORMS = "return sum(grad.norm().full_tensor() for grad in grads)"
NO_ROOT = "return sum(grad.norm().full_tensor() ** 2 for grad in grads)"
GATHERED = "return nn.utils.get_total_norm([grad.full_tensor() for grad in grads])"
OWN_MESH = """total = 0.0
    for grad in grads:
        square = grad.to_local().square().sum()
        for axis in range(grad.device_mesh.ndim):
            dist.all_reduce(square, group=grad.device_mesh.get_group(axis))
        total = total + square
    return total.sqrt()"""
SORTED = """total = 0.0
    for grad in grads:
        whole = grad
        for dim in range(grad.ndim):
            whole = whole.sort(dim=dim)[0]
        total = total + whole.redistribute(placements=[Replicate()] * whole.device_mesh.ndim).to_local().square().sum()
    return total.sqrt()"""
WHERE_IT_IS_CUT = """total = 0.0
    for grad in grads:
        square = grad.to_local().square().sum()
        for axis, placement in enumerate(grad.placements):
            if {is_cut}:
                dist.all_reduce(square, group=grad.device_mesh.get_group(axis))
        total = total + square
    return total.sqrt()"""
CLIPS = """by_mesh = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter)
    return torch.stack([nn.utils.clip_grad_norm_(group, 1.0).full_tensor() for group in by_mesh.values()]).norm()"""
ALL_AT_ONCE = "return nn.utils.get_total_norm(grads)"
DP_ONLY = """total = 0.0
    for grad in grads:
        square = grad.to_local().square().sum()
        dist.all_reduce(square, group=grad.device_mesh.get_group(0))
        total = total + square
    return total.sqrt()"""


def test_the_notebook_s_grad_norm_passes(pool: labkit.WorkerPool) -> None:
    pool.run_cell(exercise("grad_norm"))
    assert lab05.check_grad_norm(pool).startswith("Solved: ")


def test_a_norm_added_up_by_hand_passes(pool: labkit.WorkerPool) -> None:
    pool.run_cell(BY_HAND)
    assert lab05.check_grad_norm(pool).startswith("Solved: ")


@on_two_and_four
@pytest.mark.parametrize(
    ("body", "said", "hint"),
    [
        (LOCAL, "has the norm", "Combine it with those of the other ranks"),
        (COPIES, "has the norm", "you count each copy"),
        (SUM_OF_NORMS, "has the norm", "Norms do not add up"),
        (NO_ROOT, "has the norm", "the root is missing"),
        (OWN_MESH, "has the norm", "along the axes where it is copied"),
        (GATHERED, "elements per parameter", "You gather gradients"),
        (SORTED, "elements per parameter", "You gather gradients"),
    ],
    ids=["local", "copies", "sum_of_norms", "no_root", "own_mesh", "gathered", "sorted"],
)
def test_wrong_norms_are_refused_with_a_hint(pool: labkit.WorkerPool, body: str, said: str, hint: str) -> None:
    pool.run_cell(ONE_RESULT.format(body=body))
    with pytest.raises(ExerciseError, match=said) as caught:
        lab05.check_grad_norm(pool)
    assert hint in str(caught.value)


@on_four
def test_a_sum_over_the_dp_axis_only_is_refused_with_a_hint(pool: labkit.WorkerPool) -> None:
    pool.run_cell(ONE_RESULT.format(body=DP_ONLY))
    with pytest.raises(ExerciseError, match="has the norm") as caught:
        lab05.check_grad_norm(pool)
    assert "along the other axis" in str(caught.value)


@on_four
@pytest.mark.parametrize("is_cut", ["placement.is_shard()", "isinstance(placement, Shard)"])
def test_a_sum_that_takes_a_strided_shard_for_a_copy_is_refused_with_a_hint(pool: labkit.WorkerPool, is_cut: str) -> None:
    pool.run_cell(ONE_RESULT.format(body=WHERE_IT_IS_CUT.format(is_cut=is_cut)))
    with pytest.raises(ExerciseError, match="has the norm") as caught:
        lab05.check_grad_norm(pool)
    assert "_StridedShard is not a Shard" in str(caught.value)
    pool.run_cell(ONE_RESULT.format(body=WHERE_IT_IS_CUT.format(is_cut="not placement.is_replicate()")))
    assert lab05.check_grad_norm(pool).startswith("Solved: ")


def test_a_norm_that_changes_the_gradients_is_refused_with_a_hint(pool: labkit.WorkerPool) -> None:
    pool.run_cell(ONE_RESULT.format(body=CLIPS))
    with pytest.raises(ExerciseError, match="gradients have changed afterwards") as caught:
        lab05.check_grad_norm(pool)
    assert "get_total_norm only measures" in str(caught.value)


@on_two_and_four
def test_all_meshes_at_once_are_refused_in_a_few_lines_with_a_hint(pool: labkit.WorkerPool) -> None:
    pool.run_cell(ONE_RESULT.format(body=ALL_AT_ONCE))
    with pytest.raises(ExerciseError, match="grad_norm raised RuntimeError") as caught:
        lab05.check_grad_norm(pool)
    assert "one mesh at a time" in str(caught.value)
    assert len(str(caught.value)) < 600


@on_two_and_four
def test_what_raises_is_told_with_its_line_and_can_be_called_again(pool: labkit.WorkerPool) -> None:
    pool.run_cell(ONE_RESULT.format(body="return grads[0].norm() + missing"))
    with pytest.raises(ExerciseError, match=re.escape("grad_norm(norm_model()): grad_norm raised NameError")) as caught:
        lab05.check_grad_norm(pool)
    assert "in the line 'return grads[0].norm() + missing'" in str(caught.value)
    with pytest.raises(RankFailedError, match="NameError"):
        pool.run_cell("from labkit.course.labs.lab05 import norm_model\ngrad_norm(norm_model())")


PER_MESH = """by_mesh = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh, []).append(grad)
    return torch.stack([nn.utils.get_total_norm(group).full_tensor() for group in by_mesh.values()]).norm()"""


@on_two_and_four
def test_what_dtensor_sends_of_itself_is_counted(pool: labkit.WorkerPool) -> None:
    pool.run_cell(ONE_RESULT.format(body=PER_MESH))
    line = lab05.check_grad_norm(pool)
    assert line.startswith("Solved: ")
    assert "with 0.0 elements" not in line


@on_four
def test_a_grad_norm_that_is_not_written_yet_is_said(pool: labkit.WorkerPool) -> None:
    pool.run_cell("def grad_norm(model):\n    raise NotImplementedError")
    with pytest.raises(Exception, match="grad_norm is not solved yet"):
        lab05.check_grad_norm(pool)


def test_a_missing_grad_norm_is_said() -> None:
    with (
        labkit.WorkerPool(1, device="cpu", replace=True) as pool,
        pytest.raises(ExerciseError, match="there is no grad_norm on rank 0 yet"),
    ):
        lab05.check_grad_norm(pool)
