"""Notebook 07's checks accept the notebook's own solutions and refuse plausible wrong answers, with a fitting hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

import labkit
from labkit.course.labs import lab07
from labkit.course.labs.lab07.between import _cases
from labkit.errors import ExerciseError
from labkit.plan.traffic import traffic_of
from labkit.spmd.shards.layouts import MeshRecord
from labkit.spmd.trace.events import Collective
from tests.notebooks import exercises
from tests.notebooks.exercises import exercise_cell, with_mistake

NOTEBOOK = "07_two_machines"


def exercise(name: str) -> str:
    return exercise_cell(NOTEBOOK, f"def {name}(")


def test_machines_are_two_or_one_for_each_rank() -> None:
    assert [lab07.num_nodes(world_size, 12) for world_size in (2, 3, 4)] == [2, 3, 2]


@pytest.mark.parametrize(
    ("world_size", "batch_size", "message"), [(6, 12, "over 2, 3 or 4"), (1, 12, "Set one of"), (3, 16, "to 12")]
)
def test_ranks_that_cannot_share_the_model_or_the_batch_are_refused(world_size: int, batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lab07.num_nodes(world_size, batch_size)


# Exercise 1 ----------------------------------------------------------------------------------------------------------

Groups = list[list[int]]


def between_bytes() -> Callable[[Groups, int, int], int]:
    found: Callable[[Groups, int, int], int] = exercises.defined_by(exercise("between_bytes"), "between_bytes")
    return found


def leaves(rank: int, following: int, per_node: int) -> bool:
    return rank // per_node != following // per_node


def links(group: list[int]) -> list[tuple[int, int]]:
    return list(zip(group, [*group[1:], group[0]], strict=True))


def open_chain(groups: Groups, per_node: int, sent: int) -> int:
    return sent * sum(leaves(*link, per_node) for group in groups for link in pairwise(group))


def whole_groups(groups: Groups, per_node: int, sent: int) -> int:
    return sent * sum(len(group) for group in groups if len({rank // per_node for rank in group}) > 1)


def everything(groups: Groups, per_node: int, sent: int) -> int:
    return sent * sum(map(len, groups))


def once_a_node(groups: Groups, per_node: int, sent: int) -> int:
    nodes = [len({rank // per_node for rank in group}) for group in groups]
    return sent * sum(num for num in nodes if num > 1)


def places_and_not_nodes(groups: Groups, per_node: int, sent: int) -> int:
    return sent * sum(one % per_node != other % per_node for group in groups for one, other in links(group))


def both_ways(groups: Groups, per_node: int, sent: int) -> int:
    return 2 * between_bytes()(groups, per_node, sent)


def far_apart(groups: Groups, per_node: int, sent: int) -> int:
    return sent * sum(abs(one - other) >= per_node for group in groups for one, other in links(group))


def first_group(groups: Groups, per_node: int, sent: int) -> int:
    return between_bytes()(groups[:1], per_node, sent)


def test_the_notebook_s_between_bytes_passes() -> None:
    assert lab07.check_between_bytes(between_bytes()).startswith("Solved: 9 meshes of up to 1,024 ranks")


def test_the_check_s_answers_are_those_of_plans_wherever_a_mesh_has_such_groups() -> None:
    compared = 0
    for case in _cases():
        flat = [rank for group in case.groups for rank in group]
        if sorted(flat) != list(range(len(flat))) or case.what.startswith("a ring that goes"):
            continue
        mesh = MeshRecord(("outer", "ring"), (len(case.groups), len(case.groups[0])), tuple(flat))
        size = len(case.groups[0])
        calls = [Collective("all_gather", 1000 * size, size, 0.0, 0.0, "ring")]
        planned = sum(each.between_bytes for each in traffic_of(calls, mesh, case.ranks_per_node))
        assert planned == case.num_leaving * 1000 * (size - 1), case.what
        compared += 1
    assert compared >= 6


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (open_chain, "A ring is closed"),
        (whole_groups, "the next rank may be on the same node"),
        (everything, "Bytes that stay on a node do not count"),
        (once_a_node, "it may leave the same node twice"),
        (first_group, "All groups of the axis work at the same time"),
        (places_and_not_nodes, "is the place of a rank on its node"),
        (both_ways, "Twice too much"),
        (far_apart, "compare the nodes of both ranks"),
        (lambda groups, per_node, sent: 7, "Which ranks have their successor on another node"),
        (lambda groups, per_node, sent: None, "has to return a number"),
        (lambda groups, per_node, sent: None if len(groups) > 4 else 1, "returned None. It has to return a number"),
    ],
)
def test_wrong_bytes_are_refused_with_a_fitting_hint(wrong: Callable[[Groups, int, int], Any], hint: str) -> None:
    with pytest.raises(ExerciseError, match=hint):
        lab07.check_between_bytes(wrong)


# Exercise 2 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(4, device="cpu", replace=True) as pool:
        pool.run_cell("import warnings, torch, torch.distributed as dist\nwarnings.simplefilter('ignore')")
        yield pool


def solution() -> str:
    return exercise("all_reduce_by_node")


@pytest.mark.process
@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_the_notebook_s_all_reduce_passes(pool: labkit.WorkerPool, num_nodes: int) -> None:
    pool.run_cell(solution())
    size = 4 * 6 * 4 // num_nodes
    line = lab07.check_all_reduce_by_node(pool, num_nodes)
    assert line.endswith(f"{2 * size * (num_nodes - 1)} bytes went between nodes for a tensor of {size}.")


@pytest.mark.process
def test_a_leader_on_each_node_is_as_good(pool: labkit.WorkerPool) -> None:
    pool.run_cell("""
def all_reduce_by_node(tensor, mesh):
    node, local = mesh.get_group("node"), mesh.get_group("local")
    dist.reduce(tensor, group=local, group_dst=0)
    if dist.get_rank(local) == 0:
        dist.all_reduce(tensor, group=node)
    dist.broadcast(tensor, group=local, group_src=0)
    return tensor
""")
    assert lab07.check_all_reduce_by_node(pool, 2).startswith("Solved")


def with_body(*lines: str) -> str:
    return "\n    ".join(["def all_reduce_by_node(tensor, mesh):", *lines])


@pytest.mark.process
@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda: with_body("dist.all_reduce(tensor)", "return tensor"), "A ring over all ranks ignores nodes"),
        (
            lambda: with_body(
                'dist.all_reduce(tensor, group=mesh.get_group("local"))',
                'dist.all_reduce(tensor, group=mesh.get_group("node"))',
                "return tensor",
            ),
            "Let each send one piece",
        ),
        (lambda: with_mistake(solution(), "node, local = mesh", "local, node = mesh"), "The axes are the wrong way round"),
        (lambda: with_mistake(solution(), "return result", "return result / world_size"), "too small by a factor of 4"),
        (
            lambda: with_body("dist.all_reduce(tensor)", 'dist.all_reduce(tensor, group=mesh.get_group("local"))', "return tensor"),
            "too large by a factor of 2",
        ),
        (lambda: with_mistake(solution(), "return result", "return piece"), "have to be put together again"),
        (lambda: with_mistake(solution(), "dist.all_reduce(piece, group=node)", "pass"), "The other nodes are missing"),
        (lambda: with_body("dist.all_reduce(tensor)"), "did not return a tensor on rank 0"),
        (lambda: with_mistake(solution(), "piece, group=node", "piece, group=dist.new_group([rank])"), "not the mesh's|missing"),
    ],
)
def test_a_wrong_all_reduce_is_refused_with_a_fitting_hint(pool: labkit.WorkerPool, wrong: Callable[[], str], hint: str) -> None:
    pool.run_cell(wrong())
    with pytest.raises(ExerciseError, match=hint):
        lab07.check_all_reduce_by_node(pool, 2)


# Exercise 3 ----------------------------------------------------------------------------------------------------------


def lost_names(source: str) -> Any:
    return exercises.defined_by(source, "lost_names", FileSystemReader=FileSystemReader)


def files_of(folder: Path) -> dict[str, list[str]]:
    pieces: dict[str, list[str]] = {}
    for index, place in FileSystemReader(folder).read_metadata().storage_data.items():
        pieces.setdefault(index.fqn, []).append(place.relative_path)
    return pieces


def the_files(folder: Path, node: int, per_node: int) -> set[str]:
    files = {file for parts in files_of(folder).values() for file in parts}
    return {file for file in files if int(file.split("_")[2]) // per_node == node}


def only_if_all_are_lost(folder: Path, node: int, per_node: int) -> set[str]:
    return {name for name, parts in files_of(folder).items() if all(int(file.split("_")[2]) // per_node == node for file in parts)}


def all_names(folder: Path, node: int, per_node: int) -> set[str]:
    return set(files_of(folder))


def what_is_left(folder: Path, node: int, per_node: int) -> set[str]:
    return all_names(folder, node, per_node) - lost_names(exercise("lost_names"))(folder, node, per_node)


def two_on_each_node(folder: Path, node: int, per_node: int) -> Any:
    return lost_names(exercise("lost_names"))(folder, node, 2)


def a_list(folder: Path, node: int, per_node: int) -> list[str]:
    return sorted(lost_names(exercise("lost_names"))(folder, node, per_node))


def test_the_notebook_s_lost_names_pass() -> None:
    assert lab07.check_lost_names(lost_names(exercise("lost_names"))).startswith("Solved: 6 checkpoints")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda: the_files, "These are files"),
        (lambda: only_if_all_are_lost, "lost when one of its pieces is"),
        (lambda: lost_names(with_mistake(exercise("lost_names"), "rank // ranks_per_node", "rank")), "Which node is it on"),
        (lambda: lost_names(with_mistake(exercise("lost_names"), 'split("_")[2]', "strip('_')[0]")), "more than one digit"),
        (
            lambda: lost_names(with_mistake(exercise("lost_names"), 'split("_")[2]', "split('_')[3].split('.')[0]")),
            "The second number counts the files of one rank",
        ),
        (lambda: all_names, "These are all tensors of the checkpoint"),
        (lambda: what_is_left, "Name the lost ones"),
        (lambda: two_on_each_node, "Your nodes have 2 ranks each"),
        (lambda: lost_names(with_mistake(exercise("lost_names"), "== node", "!= node")), "of the nodes that are left"),
        (lambda: lambda *_: {"w7"}, "says for each piece in which file it is"),
        (lambda: lambda *_: "w1", "has to return a set of names"),
        (lambda: a_list, "has to return a set of names"),
    ],
)
def test_wrong_names_are_refused_with_a_fitting_hint(wrong: Callable[[], Any], hint: str) -> None:
    with pytest.raises(ExerciseError, match=hint):
        lab07.check_lost_names(wrong())
