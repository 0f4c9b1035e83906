"""Notebook 03's checks accept the notebook's own solutions and refuse plausible wrong answers, with a fitting hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import labkit
from labkit.course.labs import lab03
from labkit.errors import ExerciseError
from tests.matrix import matrix
from tests.notebooks import exercises
from tests.notebooks.exercises import exercise_cell

NOTEBOOK = "03_fsdp1_to_fsdp2"
IMPORTS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from labkit.spmd import Block
mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
"""


def exercise(name: str) -> str:
    return exercise_cell(NOTEBOOK, f"def {name}(")


def defined_by(source: str, name: str) -> Any:
    return exercises.defined_by(source, name, torch=torch)


def refused(check: Callable[[], str]) -> str:
    with pytest.raises(ExerciseError) as caught:
        check()
    return str(caught.value)


# Exercise 1 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=matrix(2, 1, 3, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        pool.run_cell(IMPORTS)
        yield pool


on_two = pytest.mark.parametrize("pool", [2], indirect=True)


def test_the_notebook_s_shard_like_passes_and_says_what_a_rank_holds(pool: labkit.WorkerPool) -> None:
    pool.run_cell(exercise("shard_like"))
    line = lab03.check_shard_like(pool)
    assert line.startswith("Solved: ")
    assert "NO_SHARD 193,408 bytes" in line
    assert ("One rank cannot show more" in line) is (pool.world_size == 1)


ROOT_ONLY = """
def shard_like(model, strategy):
    return fully_shard(model, mesh=mesh)
"""
STRATEGY_IGNORED = """
def shard_like(model, strategy):
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
"""
STRATEGIES_SWAPPED = """
def shard_like(model, strategy):
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=strategy == "SHARD_GRAD_OP")
    return fully_shard(model, mesh=mesh)
"""
ROOT_FREED = """
def shard_like(model, strategy):
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=strategy == "FULL_SHARD")
    return model
"""
NO_ROOT = """
def shard_like(model, strategy):
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=strategy == "FULL_SHARD")
    return model
"""
NOTHING_RETURNED = """
def shard_like(model, strategy):
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
"""
ONLY_RESHARD = """
def shard_like(model, strategy):
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=strategy == "FULL_SHARD")
    return fully_shard(model, mesh=mesh)
"""
FOR_NO_SHARD = """
def shard_like(model, strategy):
    where = mesh
    if strategy == "NO_SHARD":
        where = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("replicate", "shard"))
    for block in model.layers:
        fully_shard(block, mesh=where, reshard_after_forward=strategy == "FULL_SHARD")
    return fully_shard(model, mesh=where)
"""
ROOT_CUT = FOR_NO_SHARD.replace("(model, mesh=where)", "(model, mesh=mesh)")
NOT_REDUCED = (
    FOR_NO_SHARD
    + """
shard_by_mesh = shard_like

def shard_like(model, strategy):
    model = shard_by_mesh(model, strategy)
    model.set_requires_all_reduce(False)
    return model
"""
)
DDP = """
from torch.nn.parallel import DistributedDataParallel

def shard_like(model, strategy):
    if strategy == "NO_SHARD":
        return DistributedDataParallel(model)
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=strategy == "FULL_SHARD")
    return fully_shard(model, mesh=mesh)
"""
FSDP1 = """
from torch.distributed.fsdp import FullyShardedDataParallel

def shard_like(model, strategy):
    return FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
"""
MISSPELT = """
def shard_like(model, strategy):
    return fully_shard(model, meshes=mesh)
"""
HOLE = """
def shard_like(model, strategy):
    raise NotImplementedError
"""
FORWARD_BROKEN = (
    ONLY_RESHARD
    + """
shard_well = shard_like

def shard_like(model, strategy):
    model = shard_well(model, strategy)
    model.layers = None
    return model
"""
)
PLAIN_COPY = ONLY_RESHARD.replace("    for block", "    if strategy == 'NO_SHARD':\n        return model\n    for block", 1)


@on_two
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ROOT_ONLY, "There is one unit"),
        (STRATEGY_IGNORED, "the order of the other strategy"),
        (STRATEGIES_SWAPPED, "the order of the other strategy"),
        (ROOT_FREED, "The root is freed after forward"),
        (NO_ROOT, "was fully_shard called on every block and on the root"),
        (NOTHING_RETURNED, "return it from the function too"),
        (ROOT_CUT, "Parameters outside the blocks belong to the root: it needs the same mesh"),
        (NOT_REDUCED, "29 parameters have no gradient after backward"),
        (DDP, "DDP averages gradients as NO_SHARD does, and wraps the model"),
        (FSDP1, "That is FSDP1 itself"),
        (FORWARD_BROKEN, "your model cannot be used: TypeError: 'NoneType' object is not iterable"),
        (ONLY_RESHARD, "the mesh says whether it is cut at all"),
        (PLAIN_COPY, "Nothing averages the gradients"),
    ],
)
def test_wrong_strategies_are_refused_with_what_differs_and_a_hint(pool: labkit.WorkerPool, source: str, message: str) -> None:
    pool.run_cell(source)
    text = refused(lambda: lab03.check_shard_like(pool))
    assert message in text
    assert "Target: " in text


@pytest.mark.parametrize("pool", [4], indirect=True)
def test_a_root_that_is_cut_where_it_should_be_whole_is_refused_on_more_ranks(pool: labkit.WorkerPool) -> None:
    pool.run_cell(ROOT_CUT)
    assert "Target: 193,408 bytes" in refused(lambda: lab03.check_shard_like(pool))


@on_two
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (HOLE, "shard_like is not solved yet"),
        (MISSPELT, "raised TypeError: fully_shard() got an unexpected keyword argument 'meshes'"),
    ],
)
def test_a_shard_like_that_raises_is_told_for_which_strategy(pool: labkit.WorkerPool, source: str, message: str) -> None:
    pool.run_cell(source)
    assert message in refused(lambda: lab03.check_shard_like(pool))


# Exercise 2 ----------------------------------------------------------------------------------------------------------

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module")


def test_the_notebook_s_canonical_passes() -> None:
    assert lab03.check_canonical(defined_by(exercise("canonical"), "canonical")) == "Solved: 13 names, all right."


def replaced(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(f"{wrapper}.", "")
    return name


def outermost(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.removeprefix(f"{wrapper}.")
    return name


def every_module(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def every_leading_module(name: str) -> str:
    parts = [part for part in name.split(".") if part not in WRAPPERS[:3]]
    while parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def no_compile(name: str) -> str:
    parts = [part for part in name.split(".") if part not in WRAPPERS[:2]]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def ddp_outermost_only(name: str) -> str:
    name = name.removeprefix("module.")
    return ".".join(part for part in name.split(".") if part not in WRAPPERS[:3])


def no_fsdp(name: str) -> str:
    parts = [part for part in name.split(".") if part not in WRAPPERS[1:3]]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def no_checkpointing(name: str) -> str:
    parts = [part for part in name.split(".") if part not in (WRAPPERS[0], WRAPPERS[2])]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


@pytest.mark.parametrize(
    ("wrong", "shown", "hint"),
    [
        (replaced, "before_orig_mod.weight' became", "your result has a part that is not in this name"),
        (outermost, "'_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.attention", "every block has one of its own"),
        (every_module, "'encoder.module.weight' became", "A module of the model may be called module too"),
        (every_leading_module, "'module.module.weight' became 'weight'", "DDP wraps once"),
        (no_compile, "_orig_mod.layers.1", "torch.compile leaves _orig_mod"),
        (ddp_outermost_only, "'_orig_mod.module._fsdp_wrapped_module.head.weight'", "DDP's module is still there"),
        (no_checkpointing, "layers.0._checkpoint_wrapped_module", "Activation checkpointing leaves"),
        (no_fsdp, "_fsdp_wrapped_module", "FSDP1 leaves _fsdp_wrapped_module"),
        (lambda name: name, "'_fsdp_wrapped_module.embed.weight' became", "nothing is dropped yet"),
        (lambda name: "weight", "became 'weight'", "Every name came out the same"),
        (last_part, "became 'weight'", "A part of the model's own is gone"),
    ],
)
def test_wrong_names_are_refused_with_one_that_shows_it_and_a_hint(wrong: Callable[[str], str], shown: str, hint: str) -> None:
    text = refused(lambda: lab03.check_canonical(wrong))
    assert hint in text
    assert "of 13 names are wrong" in text
    assert shown in text.split("Target")[0]


def unsolved(*_: Any) -> Any:
    raise NotImplementedError


def stumbling(*_: Any) -> Any:
    raise IndexError("list index out of range")


@pytest.mark.parametrize("check", [lab03.check_canonical, lab03.check_by_name, lab03.check_differences])
def test_a_hole_is_called_one_and_an_error_is_told_with_the_line_it_comes_from(check: Callable[[Any], str]) -> None:
    assert "unsolved is not solved yet" in refused(lambda: check(unsolved))
    text = refused(lambda: check(stumbling))
    assert "raised IndexError: list index out of range, in the line 'raise IndexError(" in text


def test_a_canonical_that_returns_no_text_is_told_so() -> None:
    assert "returned list" in refused(lambda: lab03.check_canonical(lambda name: name.split(".")))  # type: ignore[arg-type,return-value]


# Exercise 3 ----------------------------------------------------------------------------------------------------------

OptimizerState = dict[str, Any]
ByName = Callable[[OptimizerState, Sequence[str]], Mapping[str, Any]]


def test_the_notebook_s_by_name_passes() -> None:
    assert lab03.check_by_name(defined_by(exercise("by_name"), "by_name")).startswith("Solved: 3 later steps equal")


def named(state: OptimizerState, names: Sequence[str], **changed: Any) -> OptimizerState:
    """The right answer, written differently from the notebook's."""
    table = dict(enumerate(names))
    groups = []
    for group in state["param_groups"]:
        groups.append(dict(group) | {"params": list(map(table.get, group["params"]))})
    right = {"state": {table[number]: dict(value) for number, value in state["state"].items()}, "param_groups": groups}
    return right | changed


def numbers_kept_in_groups(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    return named(state, names, param_groups=state["param_groups"])


def counted_per_group(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    groups = [{**group, "params": list(names[: len(group["params"])])} for group in state["param_groups"]]
    return named(state, names, param_groups=groups)


def order_of_the_model(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    return named(state, sorted(names))


def frozen_dropped(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    right = named(state, names)
    groups = [{**group, "params": [name for name in group["params"] if name in right["state"]]} for group in right["param_groups"]]
    return right | {"param_groups": groups}


def options_dropped(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    right = named(state, names)
    return right | {"param_groups": [{"params": group["params"], "lr": group["lr"]} for group in right["param_groups"]]}


def steps_forgotten(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    right = named(state, names)
    return right | {"state": {name: {**value, "step": torch.tensor(0.0)} for name, value in right["state"].items()}}


def moments_in_the_order_of_the_state(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    values = [dict(value) for value in state["state"].values()]
    return named(state, names) | {"state": dict(zip(sorted(names[number] for number in state["state"]), values, strict=True))}


def counted_by_entries(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    return named(state, names) | {"state": dict(zip(names, map(dict, state["state"].values()), strict=False))}


def in_place(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    for group in state["param_groups"]:
        group["params"] = [names[number] for number in group["params"]]
    return {"state": {names[number]: value for number, value in state["state"].items()}, "param_groups": state["param_groups"]}


def changed_groups(change: Callable[[list[OptimizerState]], Any]) -> ByName:
    """The right answer with another list of groups."""
    return lambda state, names: named(state, names, param_groups=change(named(state, names)["param_groups"]))


def changed_moments(change: Callable[[OptimizerState], Any]) -> ByName:
    """The right answer with another state for each parameter."""
    return lambda state, names: (
        named(state, names) | {"state": {name: change(value) for name, value in named(state, names)["state"].items()}}
    )


def merged(groups: list[OptimizerState]) -> list[OptimizerState]:
    return [{**groups[0], "params": [name for group in groups for name in group["params"]]}]


def without(*keys: str) -> Callable[[OptimizerState], OptimizerState]:
    return lambda entry: {key: value for key, value in entry.items() if key not in keys}


def entry_for_the_frozen(state: OptimizerState, names: Sequence[str]) -> OptimizerState:
    return named(state, names) | {"state": {name: dict(state["state"].get(number, {})) for number, name in enumerate(names)}}


def in_bfloat16(value: OptimizerState) -> OptimizerState:
    return {key: tensor if key == "step" else tensor.bfloat16() for key, tensor in value.items()}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda state, names: None, "a dictionary with the two keys"),
        (lambda state, names: named(state, names) | {"state": None}, "'state' is a NoneType in your result"),
        (changed_groups(lambda groups: (group for group in groups)), "'param_groups' is a generator in your result"),
        (changed_groups(lambda groups: [group["params"] for group in groups]), "entry 0 of 'param_groups' is a list"),
        (changed_groups(lambda groups: [without("params")(group) for group in groups]), "'params' of group 0 is a NoneType"),
        (changed_groups(lambda groups: [{**group, "params": iter(group["params"])} for group in groups]), "is a list_iterator"),
        (changed_moments(lambda value: list(value.values())), "the state of 'third' is a list"),
        (changed_moments(lambda value: value | {"step": "3"}), "the new optimizer cannot go on from your result"),
        (changed_moments(lambda value: value | {"exp_avg": torch.ones(5)}), "the new optimizer cannot go on from your result"),
    ],
)
def test_a_state_of_another_form_is_told_which_part_it_is(wrong: ByName, message: str) -> None:
    assert message in refused(lambda: lab03.check_by_name(wrong))


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lambda state, names: named(state, names) | {"state": {}}, "The state is empty"),
        (changed_groups(merged), "The old optimizer has two groups"),
        (changed_groups(lambda groups: groups[::-1]), "The groups are in another order"),
        (entry_for_the_frozen, "The frozen parameter has no entry in the old state"),
        (changed_groups(lambda groups: [without("lr")(group) for group in groups]), "'lr' is missing in ['param_groups'][0]"),
        (changed_groups(lambda groups: [group | {"lr": 1.0} for group in groups]), "A group has options that are not its own"),
        (changed_moments(in_bfloat16), "nothing may be cast"),
        (changed_moments(without("step")), "The step count is part of the state"),
        (changed_moments(without("exp_avg_sq")), "has three entries: a step count and two moments"),
        (numbers_kept_in_groups, "Numbers are in two places"),
        (counted_per_group, "You count from 0 in each group"),
        (order_of_the_model, "names are in the order of the old optimizer"),
        (frozen_dropped, "The frozen parameter has no state, but it has a number and a group"),
        (options_dropped, "A group has more than its parameters"),
        (steps_forgotten, "The step count is part of the state"),
        (moments_in_the_order_of_the_state, "The moments of a parameter are not its own"),
        (counted_by_entries, "A frozen parameter has a number but no state"),
        (in_place, "A group is a dict"),
    ],
)
def test_wrong_states_by_name_are_refused_with_the_steps_and_a_hint(wrong: ByName, hint: str) -> None:
    assert hint in refused(lambda: lab03.check_by_name(wrong))


# Exercise 4 ----------------------------------------------------------------------------------------------------------

State = Mapping[str, Any]
Differences = Callable[[State, State], set[str]]


def test_the_notebook_s_differences_passes() -> None:
    assert lab03.check_differences(defined_by(exercise("differences"), "differences")).startswith("Solved: 13 kinds of damage")


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist()


def judge(
    old: State,
    new: State,
    *,
    names: Callable[[State, State], set[str]] = lambda old, new: {*old, *new},
    tensors: Callable[[torch.Tensor, torch.Tensor], bool] = lambda a, b: bits(a) == bits(b),
    values: Callable[[Any, Any], bool] = lambda a, b: type(a) is type(b) and a == b,
) -> set[str]:
    """A right judge, or one with a part replaced; written differently from the notebook's."""
    found = set()
    for name in names(old, new):
        if name not in old or name not in new:
            found.add(name)
            continue
        a, b = old[name], new[name]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            same = tensors(a, b)
        else:
            same = values(a, b)
        if not same:
            found.add(name)
    return found


def nan_equal(a: torch.Tensor, b: torch.Tensor, *, rtol: float = 0.0) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=rtol, equal_nan=True)


def values_only(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bits(a.double()) == bits(b.double())


def stretched(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def equal_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and stretched(a, b)


def anywhere_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.isnan().any() and b.isnan().any():
        return a.dtype == b.dtype and a.shape == b.shape
    return bits(a) == bits(b)


def by_value(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) is isinstance(b, torch.Tensor) and bool(a == b)


def judge_by_get(old: State, new: State, names: set[str]) -> set[str]:
    return {name for name in names if judge({name: old.get(name)}, {name: new.get(name)})}


WRONG_JUDGES: list[tuple[Differences, str]] = [
    (lambda old, new: judge(old, new, names=lambda old, new: set(new)), "what does the old state have that the new one lacks"),
    (lambda old, new: judge(old, new, names=lambda old, new: set(old)), "what does the new state have that the old one lacks"),
    (lambda old, new: judge(old, new, tensors=torch.equal), "A state may hold a NaN"),
    (lambda old, new: judge(old, new, tensors=lambda a, b: nan_equal(a, b, rtol=1e-5)), "a tolerance lets a wrong checkpoint pass"),
    (lambda old, new: judge(old, new, tensors=values_only), "float64 has the same values but is not the same"),
    (lambda old, new: judge(old, new, tensors=stretched), "Compare the shapes first"),
    (lambda old, new: judge(old, new, tensors=anywhere_nan), "in the same place"),
    (lambda old, new: judge(old, new, values=lambda a, b: True), "Plain values are part of the state too"),
    (lambda old, new: judge(old, new, values=lambda a, b: bool(a == b)), "of different kinds"),
    (lambda old, new: judge(old, new, tensors=equal_numbers), "0.0 == -0.0, but their bits differ"),
    (lambda old, new: judge(old, new, values=by_value), "0 == False, but they are of different kinds"),
    (lambda old, new: judge_by_get(old, new, {*old, *new}), ".get returns None for both"),
    (lambda old, new: judge_by_get(old, new, {*new}) | {*(old.keys() - new.keys())}, "a None too many"),
    (lambda old, new: {name for name in {*old, *new} if old.get(name) is not new.get(name)}, "Compare values, not objects"),
]


@pytest.mark.parametrize(("wrong", "hint"), WRONG_JUDGES, ids=[hint for _, hint in WRONG_JUDGES])
def test_wrong_judges_are_refused_with_the_damage_that_they_miss(wrong: Differences, hint: str) -> None:
    assert hint in refused(lambda: lab03.check_differences(wrong))


def test_a_judge_that_raises_is_told_which_damage_it_stumbled_over() -> None:
    def impatient(old: State, new: State) -> set[str]:
        return {name for name in old if bits_or_value(old[name]) != bits_or_value(new[name])}

    text = refused(lambda: lab03.check_differences(impatient))
    assert "a tensor is missing: impatient raised KeyError: 'model.norm', in the line" in text


@pytest.mark.parametrize("answer", [None, "model.norm", 3, [["model.norm"]]])
def test_a_judge_that_returns_no_set_of_names_is_told_so(answer: Any) -> None:
    assert "a set of names" in refused(lambda: lab03.check_differences(lambda old, new: answer))


def bits_or_value(value: Any) -> Any:
    return bits(value) if isinstance(value, torch.Tensor) else value
