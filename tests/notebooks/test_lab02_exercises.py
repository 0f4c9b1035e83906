"""Notebook 02's checks accept the notebook's own solutions and refuse plausible wrong answers, with a fitting hint."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterator
from itertools import chain, combinations, permutations
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import labkit
from labkit.course.labs import lab02
from labkit.errors import ExerciseError
from tests.matrix import matrix
from tests.notebooks import exercises
from tests.notebooks.exercises import exercise_cell, with_mistake

NOTEBOOK = "02_activation_offload"


@pytest.fixture(scope="module", params=matrix(2, 1, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu", replace=True) as pool:
        pool.run_cell("import torch")
        yield pool


def exercise(name: str) -> str:
    return exercise_cell(NOTEBOOK, f"def {name}(")


def defined_by(source: str, name: str) -> Any:
    return exercises.defined_by(source, name, chain=chain, combinations=combinations, math=math)


def changed(name: str, old: str, new: str) -> str:
    return with_mistake(exercise(name), old, new)


def check_refused(caught: pytest.ExceptionInfo[ExerciseError], hint: str) -> None:
    measured, target, given = str(caught.value).split("\n")[0], "Target: ", str(caught.value)
    assert measured
    assert target in given
    assert hint in given


# Exercise 1 -----------------------------------------------------------------------------------------------------------


def test_the_notebook_s_bytes_pass(pool: labkit.WorkerPool) -> None:
    line = lab02.check_kept_bytes(pool, defined_by(exercise("kept_bytes"), "kept_bytes"))
    assert line == "Solved: 4 layers, 5,808 bytes counted, all as predicted."


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("formula", "measured", "hint"),
    [
        pytest.param("rows * (2 * dim + 4 * hidden) * bytes_each", "192 too many", "x is saved twice", id="x counted twice"),
        pytest.param("rows * (dim + 4 * hidden + dim) * bytes_each", "192 too many", "the result of w2", id="the output"),
        pytest.param("10 * (dim + 4 * hidden) * bytes_each", "1,408 too many", "right for 10 rows", id="rows of the table"),
        pytest.param(
            "(rows * (dim + 4 * hidden) + 3 * dim * hidden) * bytes_each",
            "1,920 too many",
            "Backward needs the weights too",
            id="weights",
        ),
        pytest.param(
            "(rows * (2 * dim + 4 * hidden) + 3 * dim * hidden) * bytes_each",
            "2,112 too many",
            "counted as often as it is saved",
            id="everything that is saved",
        ),
        pytest.param(
            "rows * (dim + 3 * hidden) * bytes_each", "480 too few", "A hidden tensor is missing", id="a factor forgotten"
        ),
        pytest.param("rows * (dim + hidden) * bytes_each", "1,440 too few", "A hidden tensor is missing", id="as without a gate"),
        pytest.param("rows * 4 * hidden * bytes_each", "192 too few", "x is missing", id="no input"),
        pytest.param(
            "rows * (3 * dim + 4 * hidden) * bytes_each", "384 too many", "The result of the layer", id="result and x twice"
        ),
        pytest.param("rows * (dim + 4 * hidden)", "1,584 too few", "the number of elements", id="elements"),
        pytest.param("rows * (dim + 4 * hidden) * 4", "too few", "right for 4-byte numbers only", id="four bytes"),
        pytest.param("rows * dim * hidden", "too few", "List the operations of forward", id="something else"),
    ],
)
def test_wrong_bytes_are_refused(pool: labkit.WorkerPool, formula: str, measured: str, hint: str) -> None:
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab02.check_kept_bytes(
            pool, defined_by(changed("kept_bytes", "rows * (dim + 4 * hidden) * bytes_each", formula), "kept_bytes")
        )
    check_refused(caught, hint)


@pytest.mark.parametrize("pool", [1], indirect=True)
@pytest.mark.parametrize("answer", [None, "many", 1.5, True, math.nan, math.inf])
def test_something_that_is_no_number_of_bytes_is_refused(pool: labkit.WorkerPool, answer: Any) -> None:
    with pytest.raises(ExerciseError, match="whole number of bytes"):
        lab02.check_kept_bytes(pool, lambda *_: answer)


# Exercise 2 -----------------------------------------------------------------------------------------------------------


def test_the_notebook_s_hooks_pass(pool: labkit.WorkerPool) -> None:
    pool.run_cell(exercise("make_hooks"))
    line = lab02.check_hooks(pool)
    assert line.startswith("Solved: on every rank 9 activations with 4,320 bytes copied, no weight was")


def test_hooks_that_move_each_piece_of_memory_once_pass_too(pool: labkit.WorkerPool) -> None:
    pool.run_cell("""
from weakref import WeakValueDictionary

class Box:
    def __init__(self, host):
        self.host = host

def make_hooks(model):
    weights, known = [id(weight.untyped_storage()) for weight in model.parameters()], WeakValueDictionary()

    def pack(tensor):
        if id(tensor.untyped_storage()) in weights:
            return tensor.detach()
        key = (tensor.untyped_storage(), tensor.shape, tensor.dtype)
        return tensor.device, Box(tensor.detach().clone().cpu())

    def unpack(packed):
        return packed if isinstance(packed, torch.Tensor) else packed[1].host.to(packed[0])

    return pack, unpack
""")
    assert lab02.check_hooks(pool).startswith("Solved")


TEST = "if tensor.untyped_storage().data_ptr() in weights:"


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("old", "new", "measured", "hint"),
    [
        pytest.param(TEST, "if False:", "bytes of weights moved", "Weights stay on the device anyway", id="moves weights"),
        pytest.param(
            TEST,
            "if isinstance(tensor, torch.nn.Parameter):",
            "bytes of weights moved",
            "Compare the memory behind it",
            id="asks for Parameter",
        ),
        pytest.param(
            TEST,
            "if any(tensor is weight or tensor.data_ptr() == weight.data_ptr() and tensor.shape == weight.shape "
            "for weight in model.parameters()):",
            "768 bytes of weights moved",
            "Compare the memory behind it",
            id="forgets transposed views",
        ),
        pytest.param('.to("cpu", copy=True)', ".cpu()", "did not move", "ask for a copy", id="an alias"),
        pytest.param(TEST, "if True:", "did not move", "pack leaves every tensor where it is", id="moves nothing"),
        pytest.param(
            "return pack, unpack",
            "return (lambda t: t), (lambda t: t)",
            "did not move",
            "pack leaves every tensor where it is",
            id="two functions that do nothing",
        ),
        pytest.param(
            TEST, "if tensor.requires_grad:", "did not move", "your test for a weight takes these", id="takes what needs a gradient"
        ),
        pytest.param(
            TEST,
            "if tensor.data_ptr() in weights:",
            "192 bytes of weights moved",
            "as a part of a weight",
            id="asks where the tensor begins",
        ),
        pytest.param(
            'tensor.detach().to("cpu", copy=True)',
            "tensor.detach().clone()",
            "still on the GPU",
            "A clone is a copy on the same device",
            id="stays on the device",
        ),
        pytest.param(
            '.to("cpu", copy=True)', '.to("gpu", copy=True)', "device string: gpu", "torch has no device of that name", id="gpu"
        ),
        pytest.param(
            "return pack, unpack", "return unpack, pack", "unpack returned tuple", "return pack first, then unpack", id="swapped"
        ),
        pytest.param(
            "return pack, unpack",
            "return (lambda packed: packed['on host']), (lambda tensor: {'on host': tensor.clone().cpu()})",
            "raised",
            "return pack first, then unpack",
            id="swapped, and unpack fails",
        ),
        pytest.param(
            '.to("cpu", copy=True)',
            '.to("cpu", torch.float32, copy=True)',
            "float64 (12, 12) on cpu left",
            "with the dtype",
            id="dtype",
        ),
        pytest.param(
            '.to("cpu", copy=True)', ".to(torch.bfloat16)", "came back changed", "with the dtype", id="saves bus and bits"
        ),
        pytest.param("on_host.to(home)", "on_host.to(home).flatten()", "came back changed", "with the dtype", id="another shape"),
        pytest.param("on_host.to(home)", "on_host.to(home) * 1.0001", "it has other values", "exact or wrong", id="other values"),
        pytest.param(
            TEST,
            "if tensor.shape in {s for w in model.parameters() for s in (w.shape, w.t().shape)}:",
            "384 bytes of weights moved",
            "over the same memory",
            id="tells whole weights apart by shape",
        ),
        pytest.param(
            TEST,
            "if tensor.shape in {s for w in model.parameters() for h in (w, w.chunk(2)[0]) for s in (h.shape, h.t().shape)}:",
            "did not move",
            "can have the shape of a weight",
            id="tells weights apart by shape",
        ),
        pytest.param(
            'return tensor.device, tensor.detach().to("cpu", copy=True)',
            "return tensor.device, known.setdefault(tensor.data_ptr(), tensor.detach().clone())",
            "came back changed",
            "An address does not identify a tensor",
            id="remembers addresses for good",
        ),
        pytest.param(
            'return tensor.device, tensor.detach().to("cpu", copy=True)',
            "return tensor.device, held.setdefault(tensor.untyped_storage(), tensor.detach().clone())",
            "came back changed",
            "views of one piece of memory",
            id="takes two views for one tensor",
        ),
        pytest.param(
            "return pack, unpack", "return pack", "make_hooks returned function", "return pack, unpack", id="one function"
        ),
        pytest.param(
            "return on_host.to(home)", "on_host.to(home)", "unpack returned NoneType", "has to return a tensor", id="no result"
        ),
    ],
)
def test_wrong_hooks_are_refused(pool: labkit.WorkerPool, old: str, new: str, measured: str, hint: str) -> None:
    pool.run_cell("from torch.utils.weak import WeakIdKeyDictionary\nknown, held = {}, WeakIdKeyDictionary()")
    pool.run_cell(changed("make_hooks", old, new))
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab02.check_hooks(pool)
    check_refused(caught, hint)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        pytest.param(TEST, "if tensor.untyped_storage().data_ptr() in w:", "", id="pack"),
        pytest.param("return on_host.to(home)", "return w.to(home)", "", id="unpack"),
        pytest.param("home, on_host = packed", "home, on_host, w = packed", "exactly what pack returned", id="another form"),
    ],
)
def test_what_a_hook_raises_is_told_with_its_line(pool: labkit.WorkerPool, old: str, new: str, hint: str) -> None:
    pool.run_cell(changed("make_hooks", old, new))
    with pytest.raises(ExerciseError, match=re.escape(f"in the line {new!r}")) as caught:
        lab02.check_hooks(pool)
    assert "raised" in str(caught.value).split("\n")[0]
    assert hint in str(caught.value)
    assert ("Hint" in str(caught.value)) is bool(hint)


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_hooks_of_the_notebook_are_told_from_those_of_the_ranks(pool: labkit.WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.run_cell(changed("make_hooks", TEST, "if False:"))
    with pytest.raises(ExerciseError, match="bytes of weights moved") as caught:
        lab02.check_hooks(pool)
    assert "%%spmd" not in str(caught.value)
    monkeypatch.setattr(sys.modules["__main__"], "make_hooks", None, raising=False)  # a cell without %%spmd
    with pytest.raises(ExerciseError, match="bytes of weights moved") as caught:
        lab02.check_hooks(pool)
    check_refused(caught, "This is about the make_hooks of the ranks. There is another one in the notebook")


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_hooks_that_are_not_defined_are_asked_for(pool: labkit.WorkerPool) -> None:
    pool.run_cell("globals().pop('make_hooks', None)")
    with pytest.raises(ExerciseError, match="there is no make_hooks on rank 0 yet"):
        lab02.check_hooks(pool)


# Exercise 3 -----------------------------------------------------------------------------------------------------------


def test_the_notebook_s_outcome_passes(pool: labkit.WorkerPool) -> None:
    line = lab02.check_outcome(pool, defined_by(exercise("outcome"), "outcome"))
    assert line == "Solved: 16 orders, all as counted on the ranks."


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("old", "new", "measured", "hint"),
    [
        pytest.param(
            'hooks[-1] == "offload"',
            'hooks[0] == "offload"',
            "offload(checkpoint(block))",
            "The checkpoint is inside and comes first",
            id="outermost wins",
        ),
        pytest.param(
            'hooks[-1] == "offload"',
            'hooks == ["offload"]',
            "checkpoint(offload(block))",
            "there is nothing left to recompute",
            id="order does not matter",
        ),
        pytest.param(
            'return "everything", 1',
            'return "everything", 2',
            "offload(block): you say that everything moves and a block runs twice",
            "Nothing has to run again",
            id="offload recomputes",
        ),
        pytest.param('if kind != "shard"', "", "shard(block)", "It touches no activation", id="sharding moves"),
        pytest.param('else "nothing"), 2', 'else "nothing"), 3', "runs 3 times", "once more, not twice more", id="three times"),
        pytest.param(
            'else "nothing"), 2', 'else "inputs"), 2', "checkpoint(block): you say", "stay on the device", id="kept inputs move"
        ),
        pytest.param(
            'return "nothing", 1', 'return "nothing", 2', "block: you say", "Nothing is wrapped around", id="plain block twice"
        ),
        pytest.param(
            "if not hooks:",
            "if not hooks or order[-1] == 'shard':",
            "offload(shard(block)): you say that nothing moves",
            "It touches no activation",
            id="innermost shard hides the others",
        ),
    ],
)
def test_wrong_outcomes_are_refused(pool: labkit.WorkerPool, old: str, new: str, measured: str, hint: str) -> None:
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab02.check_outcome(pool, defined_by(changed("outcome", old, new), "outcome"))
    check_refused(caught, hint)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("order", [order for size in range(4) for order in permutations(("offload", "checkpoint", "shard"), size)])
def test_an_answer_that_is_wrong_for_one_order_only_is_refused(pool: labkit.WorkerPool, order: tuple[str, ...]) -> None:
    right = defined_by(exercise("outcome"), "outcome")
    built = "(".join([*order, "block"]) + ")" * len(order)
    with pytest.raises(ExerciseError, match=re.escape(f"{built}: you say")) as caught:
        lab02.check_outcome(pool, lambda asked: ("inputs", 3) if asked == order else right(asked))
    assert ("It touches no activation" in str(caught.value)) is ("shard" in order)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_extra_runs_instead_of_runs_are_refused_with_a_hint(pool: labkit.WorkerPool) -> None:
    right = defined_by(exercise("outcome"), "outcome")
    with pytest.raises(ExerciseError, match="block: you say that nothing moves and a block runs 0 times") as caught:
        lab02.check_outcome(pool, lambda order: (right(order)[0], right(order)[1] - 1))
    check_refused(caught, "without recomputation a block runs once")


@pytest.mark.parametrize("pool", [1], indirect=True)
@pytest.mark.parametrize("answer", [None, "nothing", ("all", 1), ("nothing", "once"), ("nothing", 2.0), ([], 1), ("nothing", True)])
def test_something_that_is_no_outcome_is_refused(pool: labkit.WorkerPool, answer: Any) -> None:
    with pytest.raises(ExerciseError, match="a pair of one of nothing, inputs, everything and a whole number"):
        lab02.check_outcome(pool, lambda _: answer)


# Exercise 4 -----------------------------------------------------------------------------------------------------------


def test_the_notebook_s_choice_passes() -> None:
    line = lab02.check_choose(defined_by(exercise("choose"), "choose"))
    assert re.fullmatch(r"Solved: the least recomputation in 65 rows of blocks, \d+ blocks recomputed in all\.", line)


PEAK = "peak = max(peak, held + saved[block])"


def greedy(saved: list[int], inputs: list[int], seconds: list[float], limit: int) -> set[int]:
    """The block that saves most per second first."""
    chosen: set[int] = set()
    order = sorted(range(len(saved)), key=lambda block: -(saved[block] - inputs[block]) / seconds[block])
    for block in order:
        if lab02_peak(saved, inputs, chosen) <= limit:
            break
        chosen.add(block)
    return {block for block in chosen if lab02_peak(saved, inputs, chosen - {block}) > limit}


def lab02_peak(saved: list[int], inputs: list[int], chosen: set[int]) -> int:
    held = peak = 0
    for block, own in enumerate(saved):
        peak = max(peak, held + own)
        held += inputs[block] if block in chosen else own
    return peak


@pytest.mark.parametrize(
    ("wrong", "measured", "hint"),
    [
        pytest.param(lambda saved, *_: range(len(saved)), "more than needed", "Recomputing the last block saves nothing", id="all"),
        pytest.param(
            lambda saved, *_: range(len(saved) - 1), "more than needed", "Keeping everything already fits", id="all but last"
        ),
        pytest.param(lambda *_: [], "too many", "all its own activations are in memory as well", id="none"),
        pytest.param(
            ("return min(fitting,", "return set(blocks) - set(min(fitting,", "block in choice))", "block in choice)))"),
            "more than needed",
            "return the others",
            id="the blocks to keep",
        ),
        pytest.param(
            ("return min(fitting,", "return [place + 1 for place in min(fitting,", "block in choice))", "block in choice))]"),
            "more than needed",
            "Places count from 0",
            id="places from 1",
        ),
        pytest.param(
            (PEAK, "pass", "return peak", "return held"),
            "recomputing \\[3\\] peaks at 32, 7 too many",
            "all its own activations are in memory as well",
            id="the sum of what is held",
        ),
        pytest.param(
            (PEAK, "peak = max(peak, held + (inputs if block in recomputed else saved)[block])"),
            "recomputing \\[3\\] peaks at 32, 7 too many",
            "all its own activations are in memory as well",
            id="only the input of a recomputed block while it runs",
        ),
        pytest.param(
            (
                PEAK,
                "pass",
                "return peak",
                "return held",
                "fitting = [",
                "fitting = [set(choice) for choice in reversed([",
                "limit]",
                "limit])]",
            ),
            "too many",
            "all its own activations are in memory as well",
            id="the sum, later blocks first",
        ),
        pytest.param(greedy, "more than needed", "Try all choices", id="greedy"),
        pytest.param(
            (PEAK, "peak = held"), "too many", "all its own activations are in memory as well", id="own activations forgotten"
        ),
        pytest.param(
            (
                "held += inputs[block] if block in recomputed else saved[block]",
                "held += 0 if block in recomputed else saved[block]",
            ),
            "too many",
            "But it keeps its input",
            id="inputs forgotten",
        ),
        pytest.param(
            ("key=lambda choice: math.fsum(seconds[block] for block in choice)", "key=len"),
            "more than needed",
            "the fewest blocks are not the least time",
            id="fewest blocks",
        ),
        pytest.param(("peak(choice) <= limit", "peak(choice) < limit"), "more than needed", "equal to the limit fits", id="below"),
        pytest.param(
            ("        return peak\n", "        return max(peak, held + saved[-1])\n"),
            "more than needed",
            "Keeping everything already fits",
            id="running block twice",
        ),
        pytest.param(
            ("return min(fitting, key=lambda choice: math.fsum(seconds[block] for block in choice))", "return fitting[0]"),
            "more than needed",
            "the fewest blocks are not the least time",
            id="first that fits",
        ),
        pytest.param(
            (
                "peak(choice) <= limit",
                "sum(inputs[b] if b in choice else saved[b] for b in blocks) + max(saved) <= limit or len(choice) == len(saved)",
            ),
            "more than needed",
            "Keeping everything already fits",
            id="everything held at once",
        ),
    ],
)
def test_wrong_choices_are_refused(wrong: Any, measured: str, hint: str) -> None:
    if callable(wrong):
        choose = wrong
    else:
        source = exercise("choose")
        for old, new in zip(wrong[::2], wrong[1::2], strict=True):
            source = with_mistake(source, old, new)
        choose = defined_by(source, "choose")
    with pytest.raises(ExerciseError, match=measured) as caught:
        lab02.check_choose(choose)
    assert re.search(hint, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("answer", "message"), [(None, "the places"), ([True] * 4, "not a mask"), ([7], "places go from 0 to 3"), (["a"], "the places")]
)
def test_something_that_is_no_choice_is_refused(answer: Any, message: str) -> None:
    with pytest.raises(ExerciseError, match=message):
        lab02.check_choose(lambda *_: answer)


def test_no_cell_gives_another_meaning_to_the_name_that_exercise_4_suggests() -> None:
    """A solution may call a function `peak` of its own, and cells before it may run once more."""
    cells = nbformat.read(exercises.FOLDER / f"{NOTEBOOK}.ipynb", as_version=4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code" and not cell.source.startswith("%%spmd")]
    trees = [ast.parse(TransformerManager().transform_cell(source)) for source in sources]
    bound = [node for tree in trees for node in outside_functions(tree) if isinstance(node, ast.Name) and node.id == "peak"]
    assert not [node for node in bound if isinstance(node.ctx, ast.Store)]


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from outside_functions(node)


# All --------------------------------------------------------------------------------------------------------------------


def test_a_hole_is_said_to_be_not_solved_yet() -> None:
    def choose(*_: Any) -> None:
        raise NotImplementedError

    with pytest.raises(ExerciseError, match="choose is not solved yet"):
        lab02.check_choose(choose)  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_what_an_answer_raises_is_told_with_the_order(pool: labkit.WorkerPool) -> None:
    def outcome(order: tuple[str, ...]) -> tuple[str, int]:
        return order[-1], 1

    with pytest.raises(ExerciseError, match=r"outcome\(\(\)\) raised IndexError"):
        lab02.check_outcome(pool, outcome)
