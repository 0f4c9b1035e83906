"""Notebook 04's checks accept the notebook's own solutions and refuse plausible wrong answers, with a fitting hint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.course.labs import lab04
from labkit.course.labs.lab04.steps import StepCase, recorded_step
from labkit.course.labs.lab04.wrapping import live_peak
from labkit.errors import ExerciseError
from tests.matrix import matrix
from tests.notebooks import exercises
from tests.notebooks.exercises import exercise_cell, with_mistake

NOTEBOOK = "04_fsdp_runtime"
IMPORTS = "import torch\nimport torch.distributed as dist\nfrom labkit.spmd import next_token_loss\n"
TIMEOUT_S = 5.0


@pytest.fixture(scope="module", params=matrix(2, 1, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu", replace=True) as pool:
        pool.run_cell(IMPORTS)
        yield pool


def exercise(name: str) -> str:
    return exercise_cell(NOTEBOOK, f"def {name}(")


def defined_by(source: str, name: str) -> Any:
    return exercises.defined_by(source, name, combinations=combinations, pairwise=pairwise)


def changed(name: str, old: str, new: str) -> str:
    return with_mistake(exercise(name), old, new)


# Exercise 1 -----------------------------------------------------------------------------------------------------------


def test_the_notebook_s_event_order_passes_with_every_number_of_ranks(pool: labkit.WorkerPool) -> None:
    line = lab04.check_event_order(pool, defined_by(exercise("event_order"), "event_order"))
    ranks = "1 rank" if pool.world_size == 1 else f"{pool.world_size} ranks"
    assert line == f"Solved: 12 orders with 120 events together, equal to what {ranks} recorded."


def order_with(
    *, root_freed: bool = False, root_last: bool = True, frees: bool = True, ahead: bool | None = None, **other: bool
) -> Any:
    def event_order(num_blocks: int, reshard: bool, prefetch: bool) -> list[str]:
        prefetch = prefetch if ahead is None else ahead
        blocks = range(num_blocks)
        freed = reshard or other.get("always_freed", False)
        events = ["U root", *(event for b in blocks for event in ([f"U {b}", f"R {b}"] if freed else [f"U {b}"]))]
        events += ["R root", "U root"] if root_freed else []
        backward = blocks if other.get("forwards", False) else reversed(blocks)
        gathers = reshard or other.get("always_freed", False) or other.get("gathered_twice", False)
        for b in backward:
            if gathers and (not prefetch or b == num_blocks - 1 or other.get("forwards", False)):
                events.append(f"U {b}")
            if gathers and prefetch and b > 0 and not other.get("forwards", False):
                events.append(f"U {b - 1}")
            if frees and not (other.get("kept_for_ever", False) and not reshard):
                events.append(f"R {b}")
        if not frees:
            events += [f"R {b}" for b in reversed(blocks)]
        return [*events, "R root"] if root_last else events

    return event_order


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("wrong", "measured", "hint"),
    [
        pytest.param(order_with(ahead=False), "number 9 in your list is 'R 2'", "order without prefetch", id="no prefetch"),
        pytest.param(
            order_with(ahead=True),
            "reshard=True, prefetch=False: number 9 in your list is 'U 1'",
            "order with prefetch",
            id="always",
        ),
        pytest.param(
            order_with(root_freed=True), "number 8 in your list is 'R root'", "the root stays whole after forward", id="root freed"
        ),
        pytest.param(
            order_with(root_last=False),
            "your list has only 13 of 14 events",
            "The root is freed too",
            id="root never freed",
        ),
        pytest.param(
            order_with(always_freed=True),
            "reshard=False, prefetch=True: number 3 in your list is 'R 0'",
            "stay whole",
            id="reshard ignored",
        ),
        pytest.param(
            order_with(gathered_twice=True),
            "reshard=False, prefetch=True: number 5 in your list is 'U 2'",
            "nothing to gather",
            id="twice",
        ),
        pytest.param(
            order_with(forwards=True), "number 8 in your list is 'U 0'", "from the last to the first", id="wrong direction"
        ),
        pytest.param(
            order_with(kept_for_ever=True),
            "reshard=False, prefetch=True: number 5 in your list is 'R root'",
            "There each is freed when its own backward is over",
            id="kept for ever",
        ),
        pytest.param(
            lambda *case: [text.replace("U ", "U layers.") for text in order_with()(*case)],
            "number 1 in your list is 'U layers.root'",
            "Write the short names",
            id="long names",
        ),
        pytest.param(lambda *_: [], "your list has only 0 of 14 events", "The list is empty", id="empty"),
        pytest.param(
            lambda *case: [*order_with()(*case)[:-1], "R 0", "R root"],
            "number 14 in your list is 'R 0'",
            "is not whole",
            id="freed twice",
        ),
        pytest.param(
            lambda *case: [f"U block {case[0] - 1}", *order_with()(*case)],
            "number 1 in your list is 'U block 2'",
            "Write the short names",
            id="names with a word",
        ),
        pytest.param(
            lambda *case: [text.replace("U 0", "U -1") for text in order_with()(*case)],
            "number 2 in your list is 'U -1'",
            "There is no such block",
            id="the block before the first",
        ),
        pytest.param(
            lambda *case: [text for text in order_with()(*case) if text[0] == "U"],
            "number 3 in your list is 'U 1'",
            "Your order frees nothing",
            id="never freed",
        ),
        pytest.param(
            lambda *case: [text for place, text in enumerate(order_with(root_freed=True)(*case)) if text != "U root" or place == 0],
            "number 8 in your list is 'R root'",
            "so it stays whole after forward",
            id="root freed and not gathered again",
        ),
        pytest.param(
            lambda n, reshard, _: [*order_with()(n, reshard, False)[: 1 + 2 * n], f"U {n - 1}", f"U {n - 1}"],
            "number 9 in your list is 'U 2'",
            "that is already whole",
            id="gathered twice in a row",
        ),
        pytest.param(
            lambda *_: ["U root", "U 0", "R 0"],
            "your list has only 3 of 14 events",
            "Compare with the picture",
            id="something else",
        ),
    ],
)
def test_wrong_orders_are_refused_at_their_first_wrong_event(pool: labkit.WorkerPool, wrong: Any, measured: str, hint: str) -> None:
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab04.check_event_order(pool, wrong)
    assert hint in str(caught.value)


@pytest.mark.parametrize("pool", [1], indirect=True)
@pytest.mark.parametrize("answer", [None, "U root", [1, 2]])
def test_something_that_is_no_list_of_texts_is_refused(pool: labkit.WorkerPool, answer: Any) -> None:
    with pytest.raises(ExerciseError, match="a list of texts"):
        lab04.check_event_order(pool, lambda *_: answer)


# Exercise 2 -----------------------------------------------------------------------------------------------------------


def test_the_notebook_s_formula_passes_with_every_number_of_ranks(pool: labkit.WorkerPool) -> None:
    line = lab04.check_collectives(pool, defined_by(exercise("collectives"), "collectives"))
    if pool.world_size == 1:
        assert line.startswith("Solved: 19 kinds of steps, 135 unshards counted, ")
        assert "the 88 reductions follow from the rule and were not counted" in line
    else:
        assert line == "Solved: 19 kinds of steps, 135 gathers and 88 reductions counted, all as predicted."


def counts_with(gathers: str, reductions: str = "(num_micro if sync_each else 1) * (num_blocks + 1)") -> Any:
    source = f"def collectives(num_blocks, num_micro, reshard, sync_each, keep):\n    return {gathers}, {reductions}\n"
    return defined_by(source, "collectives")


RIGHT = "(1 if keep else num_micro) * (1 + num_blocks) + num_micro * num_blocks * reshard"
PER_MICRO = "(1 + num_blocks + num_blocks * reshard)"


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("wrong", "measured", "hint"),
    [
        pytest.param(
            counts_with(f"{RIGHT} - (1 if keep else num_micro)", "(num_micro if sync_each else 1) * num_blocks"),
            "3 blocks, 1 micro-batch, reshard=True, sync_each=True, keep=False: you predict 6/3, 1 all-gather too few and 1 "
            "reduce-scatter too few",
            "The root is a group too",
            id="no root",
        ),
        pytest.param(
            counts_with(f"{RIGHT} + num_micro * reshard"),
            "you predict 8/4, 1 all-gather too many",
            "The root stays whole after forward",
            id="root again",
        ),
        pytest.param(
            counts_with(RIGHT, "num_micro * (num_blocks + 1)"), "you predict 14/8", "only the last micro-batch", id="sync ignored"
        ),
        pytest.param(
            counts_with(f"{PER_MICRO} * num_micro"), "keep=True: you predict 14/8, 4 all-gathers too many", "still whole", id="keep"
        ),
        pytest.param(
            counts_with(f"{PER_MICRO} * (1 if keep else num_micro)"),
            "you predict 7/8, 3 all-gathers too few",
            "next *forward* only",
            id="keep spares all",
        ),
        pytest.param(
            counts_with(PER_MICRO, "num_blocks + 1"), "you predict 7/4, 7 all-gathers too few", "Every micro-batch", id="one micro"
        ),
        pytest.param(
            counts_with(f"({RIGHT}) if sync_each else {PER_MICRO}"),
            "you predict 7/4, 7 all-gathers too few",
            "spares reduce-scatters",
            id="no sync",
        ),
        pytest.param(
            counts_with(f"{RIGHT} - (0 if sync_each else num_micro - 1) * num_blocks * reshard"),
            "you predict 11/4, 3 all-gathers too few",
            "still needs whole parameters",
            id="no sync, backward",
        ),
        pytest.param(
            counts_with("(num_micro if sync_each else 1) * (num_blocks + 1)", RIGHT),
            "you predict 4/7",
            "All-gathers come first",
            id="swapped",
        ),
        pytest.param(
            counts_with(f"{RIGHT} + (0 if reshard else num_micro * num_blocks)"),
            "2 blocks, 1 micro-batch, reshard=False, sync_each=True, keep=False: you predict 5/3, 2 all-gathers too many",
            "With reshard=False the blocks stay whole",
            id="reshard ignored",
        ),
        pytest.param(
            counts_with("(1 if keep else num_micro) * (1 + num_blocks)"),
            "you predict 4/4, 3 all-gathers too few",
            "backward gathers each of them again",
            id="forward only",
        ),
        pytest.param(counts_with("7", "4"), "you predict 7/4", "Count the bars", id="a constant"),
    ],
)
def test_wrong_formulas_are_refused_with_the_number_that_is_off(
    pool: labkit.WorkerPool, wrong: Any, measured: str, hint: str
) -> None:
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab04.check_collectives(pool, wrong)
    assert hint in str(caught.value)


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_one_number_instead_of_two_is_refused(pool: labkit.WorkerPool) -> None:
    with pytest.raises(ExerciseError, match="two numbers: all-gathers, reduce-scatters"):
        lab04.check_collectives(pool, lambda *_: 7)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_the_first_step_of_a_model_has_the_events_of_the_second(pool: labkit.WorkerPool) -> None:
    # The checks record the first step only, which is half the work.
    first, second = pool.run(two_steps).same()
    assert first == second
    assert len(first) == 14


def two_steps() -> tuple[tuple[str, ...], tuple[str, ...]]:
    from labkit.course.labs.lab04.rows import sharded_row
    from labkit.course.labs.lab04.steps import take_step
    from labkit.spmd import record_events

    case = StepCase(3, True)
    model = sharded_row([4] * 3, [1] * 3, reshard=True)
    orders = []
    for _ in range(2):
        with record_events(model) as recording:
            take_step(model, case)
        orders.append(recording.trace().order())
    assert recorded_step(case).order() == orders[0]
    return orders[0], orders[1]


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    "case",
    [StepCase(3, True), StepCase(2, False, num_micro=3, sync_each=False), StepCase(2, True, num_micro=2, keep=True)],
    ids=["one micro-batch", "reduced once", "kept whole"],
)
def test_a_row_of_layers_has_the_events_of_a_transformer(pool: labkit.WorkerPool, case: StepCase) -> None:
    row, transformer = pool.run(both_models, case).same()
    assert row == transformer


def both_models(case: StepCase) -> list[tuple[tuple[str, ...], dict[str, int]]]:
    from torch.distributed.device_mesh import init_device_mesh

    from labkit.course.labs.lab04 import steps
    from labkit.spmd import Block, ModelConfig, build_model, next_token_loss, record_events, shard_model

    config = ModelConfig(dim=16, num_layers=case.num_blocks, num_heads=2, hidden_dim=24, max_seq_len=16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shard_model(build_model(config, device="cpu"), mesh, blocks=Block, reshard_after_forward=case.reshard)
    tokens = torch.arange(18).view(2, 9)
    traces = [steps.recorded_step(case)]
    own, steps.forward_and_backward = steps.forward_and_backward, lambda model: next_token_loss(model, tokens).backward()
    try:
        with record_events(model) as recording:
            steps.take_step(model, case)
    finally:
        steps.forward_and_backward = own
    traces.append(recording.trace())
    return [(trace.order(), trace.counts()) for trace in traces]


# Exercise 3 -----------------------------------------------------------------------------------------------------------


def test_the_notebook_s_wrapping_passes_and_is_measured(pool: labkit.WorkerPool) -> None:
    line = lab04.check_wrap(pool, defined_by(exercise("wrap"), "wrap"))
    assert re.search(r"has a peak of 4,032 bytes, the limit is 4,032, and 9 all-gathers a step", line)


def test_the_rule_for_the_peak_is_the_one_that_the_runtime_keeps(pool: labkit.WorkerPool) -> None:
    from labkit.course.labs.lab04.wrapping import WIDTH, _measure

    widths = [8, 4, 12, 4]
    for lengths in ([1, 1, 1, 1], [2, 2], [4], [1, 3]):
        sizes, begin = [], 0
        for length in lengths:
            sizes.append(sum(2 * WIDTH * width * 4 for width in widths[begin : begin + length]))
            begin += length
        measured = pool.run(_measure, widths, lengths).same()
        assert measured.peak_bytes == live_peak(WIDTH * WIDTH * 4, sizes)


def greedy(limit: Any) -> Any:
    def wrap(root: int, sizes: list[int], cap: int) -> list[int]:
        lengths: list[int] = []
        group: list[int] = []
        for size in sizes:
            if group and limit(root, sum(group) + size, cap):
                lengths.append(len(group))
                group = []
            group.append(size)
        return [*lengths, len(group)]

    return wrap


def without_root(root: int, sizes: list[int], cap: int) -> list[int]:
    return list(defined_by(exercise("wrap"), "wrap")(0, sizes, cap))


@pytest.mark.parametrize("pool", [1], indirect=True)
@pytest.mark.parametrize(
    ("wrong", "measured", "hint"),
    [
        pytest.param(
            greedy(lambda root, size, cap: root + size > cap),
            "root 1, layers [2, 2, 2, 2], limit 5: you return [2, 2], groups with [4, 4] bytes, which keep 9 alive, 4",
            "two neighbours live together",
            id="one group at a time",
        ),
        pytest.param(without_root, "too many", "The root is alive all the time", id="no root"),
        pytest.param(
            lambda root, sizes, cap: [1] * len(sizes), "3 more than needed", "A group per layer always fits", id="each alone"
        ),
        pytest.param(
            lambda root, sizes, cap: [len(sizes)],
            "limit 5: you return [4], groups with [8] bytes, which keep 9",
            "it is alive beside the root",
            id="all in one",
        ),
        pytest.param(
            changed("wrap", "range(len(sizes))", "range(min(1, len(sizes) - 1), len(sizes))"),
            "limit 9: you return [1, 3], groups with [2, 6] bytes: 2 groups, 1 more than needed",
            "One group of all layers is a cut too",
            id="never a single group",
        ),
        pytest.param(
            changed("wrap", "<= cap", "< cap").replace("raise ValueError", "return None  #"),
            "root 1, layers [2, 2, 2, 2], limit 5: wrap returned None",
            "A peak equal to the limit is within it",
            id="below the limit",
        ),
        pytest.param(
            changed("wrap", " or groups", ""),
            "limit 5: wrap raised ValueError: max()",
            "",
            id="a single group forgotten",
        ),
        pytest.param(
            greedy(lambda root, size, cap: root + 2 * size > cap),
            "more than needed",
            "One group of all layers",
            id="half the limit",
        ),
        pytest.param(
            lambda root, sizes, cap: (
                [2, 1, 1, 1, 1] if (len(sizes), cap) == (6, 9) else defined_by(exercise("wrap"), "wrap")(root, sizes, cap)
            ),
            "limit 9: you return [2, 1, 1, 1, 1], groups with [2, 4, 1, 1, 1] bytes: 5 groups, 1 more than needed",
            "leaves room beside it",
            id="one group too many",
        ),
        pytest.param(lambda root, sizes, cap: [1], "[1] are 1 layers", "", id="layers left out"),
        pytest.param(
            changed("wrap", "[left + right for left, right in pairwise(groups)] or groups", "[sum(sorted(groups)[-2:])]"),
            "more than needed",
            "The two largest groups need not be neighbours",
            id="the two largest",
        ),
        pytest.param(lambda root, sizes, cap: sizes, "[2, 2, 2, 2] are 8 layers", "the bytes of the groups", id="bytes"),
        pytest.param(
            changed("wrap", "[end - begin for begin, end in spans]", "[end for begin, end in spans]"),
            "[1, 2, 3, 4] are 10 layers",
            "the places of the cuts",
            id="places",
        ),
    ],
)
def test_wrong_wrappings_are_refused_with_one_case(pool: labkit.WorkerPool, wrong: Any, measured: str, hint: str) -> None:
    function = defined_by(wrong, "wrap") if isinstance(wrong, str) else wrong
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab04.check_wrap(pool, function)
    assert hint in str(caught.value)


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_a_wrapping_that_is_no_list_is_refused(pool: labkit.WorkerPool) -> None:
    with pytest.raises(ExerciseError, match="a list of numbers"):
        lab04.check_wrap(pool, lambda *_: 7)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("pool", [1], indirect=True)
@pytest.mark.parametrize("name", ["event_order", "collectives", "wrap"])
def test_a_hole_and_an_answer_that_raises_are_told_apart(pool: labkit.WorkerPool, name: str) -> None:
    def hole(*_: Any) -> Any:
        raise NotImplementedError

    def raising(*_: Any) -> Any:
        return {}["R 7"]

    hole.__name__ = raising.__name__ = name
    check = getattr(lab04, f"check_{name}")
    with pytest.raises(ExerciseError, match=f"{name} is not solved yet"):
        check(pool, hole)
    with pytest.raises(ExerciseError, match=rf"(reshard=True|limit 5).*: {name} raised KeyError: 'R 7'"):
        check(pool, raising)


# Exercise 4 -----------------------------------------------------------------------------------------------------------


def test_the_notebook_s_judge_passes(pool: labkit.WorkerPool) -> None:
    pool.run_cell(exercise("same_training"))
    line = lab04.check_same_training(pool)
    if pool.world_size == 1:
        assert line == "Solved: 3 right runs accepted, 7 bugs refused. 4 of 14 runs need two ranks and were left out."
    else:
        assert line == "Solved: 4 right runs accepted, 10 bugs refused."


def judge(expression: str) -> str:
    return f"""
def near(part, rtol=1e-4, atol=1e-6):
    return all(torch.allclose(RUN[part][name], REFERENCE[part][name], rtol=rtol, atol=atol) for name in REFERENCE[part])

def near_losses(rtol=1e-4, atol=0.0):
    return torch.allclose(torch.tensor(RUN['losses']), torch.tensor(REFERENCE['losses']), rtol=rtol, atol=atol)

def small(part, share):
    pairs = [(RUN[part][name], REFERENCE[part][name]) for name in REFERENCE[part]]
    return all((a - b).abs().max() <= share * b.abs().max() for a, b in pairs)

def same_training(run, reference):
    global RUN, REFERENCE
    RUN, REFERENCE = run, reference
    return {expression}
"""


EXACT = (
    "run['losses'] == reference['losses'] and all(torch.equal(run[part][n], reference[part][n]) "
    "for part in ('gradients', 'weights') for n in reference[part])"
)
EACH_PART = "near('gradients', {0}) and near('weights', {0}) and near_losses({0})"


@pytest.mark.parametrize("pool", [4], indirect=True)
@pytest.mark.parametrize(
    ("expression", "measured", "hint"),
    [
        pytest.param(EXACT, ": refused by rank", "another order", id="bit for bit"),
        pytest.param(
            "abs(run['losses'][-1] - reference['losses'][-1]) < 0.2",
            "not divided by the number of ranks: accepted",
            "the losses hardly show it, and the weights only where the tolerance is tight",
            id="the last loss",
        ),
        pytest.param(
            "near('weights', 1e-1, 5e-2)", "not divided by the number of ranks: accepted", "Adam divides", id="only weights"
        ),
        pytest.param(
            "small('weights', 1e-4) and near_losses()",
            "gradients twice as large, with the losses and weights of the reference: accepted",
            "Compare the gradients too",
            id="only weights, tightly",
        ),
        pytest.param(
            EACH_PART.format("8 * 2**-23, 0.0"), "DDP: refused by rank", "Choose atol by the largest element", id="of each number"
        ),
        pytest.param(
            EACH_PART.format("1e-5, 1e-8"), ": refused by rank", "default atol=1e-8 is too little", id="defaults of allclose"
        ),
        pytest.param(
            "near('gradients')", "an optimizer that does not hold the model's tensors", "before the first step", id="only gradients"
        ),
        pytest.param(
            "torch.allclose(*(r['gradients']['layers.0.attention.wq.weight'] for r in (run, reference)), rtol=1e-4, atol=1e-6)",
            "an optimizer that does not hold the model's tensors",
            "what training has changed",
            id="one name",
        ),
        pytest.param("True", "not divided by the number of ranks: accepted", "Adam", id="accepts all"),
        pytest.param("False", "a copy of the reference: refused by rank 0", "bit for bit", id="refuses all"),
    ],
)
def test_wrong_judges_are_refused_on_the_run_that_they_get_wrong(
    pool: labkit.WorkerPool, expression: str, measured: str, hint: str
) -> None:
    pool.run_cell(judge(expression))
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab04.check_same_training(pool)
    assert hint in str(caught.value)


NEAR_WEIGHTS = "near('weights', 1e-2, 1e-3)"
SUMS = "all(abs(float((run[{0!r}][n] - reference[{0!r}][n]).sum())) < 1e-4 for n in reference[{0!r}])"


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("expression", "measured", "hint"),
    [
        pytest.param(EXACT, "a last place of its tensor's largest: refused", "another order", id="bit for bit"),
        pytest.param(
            EACH_PART.format("8 * 2**-23, 0.0"),
            "a last place of its tensor's largest: refused",
            "Choose atol by the largest element",
            id="of each number",
        ),
        pytest.param(
            EACH_PART.format("1e-5, 1e-8"),
            "a last place of its tensor's largest: refused",
            "default atol=1e-8 is too little",
            id="defaults of allclose",
        ),
        pytest.param(
            EACH_PART.format("0.01, 0.0"),
            "a last place of its tensor's largest: refused",
            "Choose atol by the largest element",
            id="a large share of each number",
        ),
        pytest.param(EACH_PART.format("0.0, 1e-2"), "AdamW instead of Adam: accepted", "hundreds of times the noise", id="loose"),
        pytest.param(
            "small('gradients', 1e-4) and small('weights', 1e-4)",
            "losses one place further, with the gradients and weights of the reference: accepted",
            "Compare the losses too",
            id="never the losses",
        ),
        pytest.param(
            f"{NEAR_WEIGHTS} and max(abs(a - b) for a, b in zip(run['losses'], reference['losses'])) < 1e-4",
            "gradients twice as large, with the losses and weights of the reference: accepted",
            "Compare the gradients too",
            id="weights and losses",
        ),
        pytest.param(
            f"{SUMS.format('gradients')} and {NEAR_WEIGHTS}",
            "gradients one place further",
            "plus and minus cancel",
            id="sum of the gradients' differences",
        ),
        pytest.param(
            f"near('gradients') and {SUMS.format('weights')}",
            "weights one place further",
            "plus and minus cancel",
            id="sum of the weights' differences",
        ),
    ],
)
def test_a_judge_that_looks_at_one_part_or_at_sums_is_refused_with_two_ranks(
    pool: labkit.WorkerPool, expression: str, measured: str, hint: str
) -> None:
    pool.run_cell(judge(expression))
    with pytest.raises(ExerciseError, match=re.escape(measured)) as caught:
        lab04.check_same_training(pool)
    assert hint in str(caught.value)


def apart(kind: str) -> float:
    """The largest difference of a weight from the reference, as a part of its tensor's largest."""
    from labkit.course.labs.lab04.trainings import trained

    right, other = trained(["reference"])["reference"]["weights"], trained([kind])[kind]["weights"]
    return max(float((other[name] - right[name]).abs().max() / right[name].abs().max()) for name in right)


@pytest.mark.parametrize("pool", [4], indirect=True)
def test_the_smallest_bug_is_far_from_the_noise(pool: labkit.WorkerPool) -> None:
    # These are the facts in the hints, and they leave room for a tolerance.
    noise = max(*pool.run(apart, "ddp").values(), *pool.run(apart, "fsdp2").values())
    bug = min(pool.run(apart, "decay").values())
    assert noise < 1e-5
    assert 5e-4 < bug < 5e-3
    assert bug > 100 * noise


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_second_attempt_trains_nothing(pool: labkit.WorkerPool) -> None:
    pool.run_cell(exercise("same_training"))
    lab04.check_same_training(pool)
    assert pool.run(trainings_of_a_second_attempt).same() == 0
    # Runs that a cut-off left on only one rank must not make it wait for the others.
    pool.run(forget, ranks=[1])
    assert lab04.check_same_training(pool, timeout_s=20.0).startswith("Solved")


def trainings_of_a_second_attempt() -> int:
    from labkit.course.labs.lab04 import judge, trainings

    calls = []
    train = trainings._train
    trainings._train = lambda kind: calls.append(kind) or train(kind)  # type: ignore[func-returns-value]
    try:
        judge._verdicts(list(judge._KINDS))
    finally:
        trainings._train = train
    return len(calls)


def forget() -> None:
    from labkit.course.labs.lab04 import trainings

    trainings._kept.clear()


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_judge_that_hangs_is_refused_within_the_limit(pool: labkit.WorkerPool) -> None:
    pool.run_cell(judge("dist.barrier() if dist.get_rank() == 0 else True"))
    with pytest.raises(ExerciseError, match="same_training hangs") as caught:
        lab04.check_same_training(pool, timeout_s=TIMEOUT_S)
    assert "every rank has to reach it" in str(caught.value)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_judge_that_sees_one_block_only_misses_the_head(pool: labkit.WorkerPool) -> None:
    name = "'layers.1.feed_forward.w2.weight'"
    gradient = f"torch.allclose(run['gradients'][{name}], reference['gradients'][{name}], rtol=1e-4, atol=1e-6)"
    moved = f"(run['weights'][{name}] - reference['weights'][{name}]).abs().mean() < 0.015"
    pool.run_cell(judge(f"{gradient} and {moved}"))
    with pytest.raises(ExerciseError, match="a head that is not: accepted") as caught:
        lab04.check_same_training(pool)
    assert "Compare every name" in str(caught.value)


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_a_judge_that_raises_shows_its_own_line(pool: labkit.WorkerPool) -> None:
    pool.run_cell(judge("run['loses']"))
    with pytest.raises(ExerciseError, match="same_training raised KeyError: 'loses', in the line \"return run"):
        lab04.check_same_training(pool)


@pytest.mark.parametrize("pool", [1], indirect=True)
@pytest.mark.parametrize("answer", ["'yes'", "None", "1", "torch.ones(2) > 0"])
def test_a_verdict_is_true_or_false(pool: labkit.WorkerPool, answer: str) -> None:
    pool.run_cell(judge(answer))
    with pytest.raises(ExerciseError, match="It has to return True or False"):
        lab04.check_same_training(pool)


@pytest.mark.parametrize("pool", [1], indirect=True)
@pytest.mark.parametrize("form", ["torch.tensor({})", "__import__('numpy').bool_({})"])
def test_a_verdict_may_come_out_of_a_comparison_of_tensors(pool: labkit.WorkerPool, form: str) -> None:
    pool.run_cell(changed("same_training", "all(near(*pair) for pair in pairs)", form.format("all(near(*pair) for pair in pairs)")))
    assert lab04.check_same_training(pool).startswith("Solved")


# Exercise 5 -----------------------------------------------------------------------------------------------------------


def check_eval_loss(pool: labkit.WorkerPool) -> str:
    return lab04.check_eval_loss(pool, timeout_s=TIMEOUT_S)


def test_the_notebook_s_evaluation_passes(pool: labkit.WorkerPool) -> None:
    pool.run_cell(exercise("eval_loss"))
    num_batches = pool.world_size * (pool.world_size + 3) // 2
    assert f"the mean over {num_batches} batches" in check_eval_loss(pool)


LOSSES = "losses = [next_token_loss(model, batch).item() for batch in {batches}]"
TOTAL = "total = torch.tensor([sum(losses), len(losses)]); dist.all_reduce(total); return (total[0] / total[1]).item()"
MOST = "most = torch.tensor(len(batches)); dist.all_reduce(most, op=dist.ReduceOp.{op})"


# Every rank takes part until all are done, and counts its own batches only.
FILLED_UP = (
    MOST.format(op="MAX"),
    LOSSES.format(batches="batches + [filler] * (int(most) - len(batches))") + "[: len(batches)]",
)


def evaluation(*lines: str) -> str:
    return "@torch.no_grad()\ndef eval_loss(model, batches, filler):\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize(
    ("lines", "measured", "hint"),
    [
        pytest.param(
            (LOSSES.format(batches="batches"), TOTAL), "eval_loss hangs", "has to take part until all are done", id="naive"
        ),
        pytest.param(
            (MOST.format(op="MIN"), LOSSES.format(batches="batches[: int(most)]"), TOTAL),
            "off.",
            "You stop every rank after 2",
            id="cut off",
        ),
        pytest.param(
            (MOST.format(op="MAX"), LOSSES.format(batches="batches + [filler] * (int(most) - len(batches))"), TOTAL),
            "off.",
            "must not be counted",
            id="filler counted",
        ),
        pytest.param(
            (MOST.format(op="MAX"), LOSSES.format(batches="batches + [batches[-1]] * (int(most) - len(batches))"), TOTAL),
            "off.",
            "must not be counted",
            id="last batch repeated",
        ),
        pytest.param(
            (
                *FILLED_UP,
                "mean = torch.tensor(sum(losses) / len(losses)); dist.all_reduce(mean); return (mean / world_size).item()",
            ),
            "off.",
            "A rank with more batches counts for more",
            id="mean of means",
        ),
        pytest.param(
            (
                *FILLED_UP,
                "return sum(losses) / len(losses)",
            ),
            "off.",
            "This is the mean of one rank",
            id="own mean",
        ),
        pytest.param(
            (
                *FILLED_UP,
                "total = torch.tensor(sum(losses)); dist.all_reduce(total); return total.item()",
            ),
            "off.",
            "This is the sum",
            id="sum",
        ),
        pytest.param(("return None",), "returned None on rank 0", "Return a number", id="nothing"),
        pytest.param(
            (
                *FILLED_UP,
                "total = torch.tensor([sum(losses), len(losses)]); dist.reduce(total, 0)",
                "return (total[0] / total[1]).item() if rank == 0 else None",
            ),
            "returned None on rank 1",
            "all_reduce gives them to each",
            id="on rank 0 only",
        ),
        pytest.param(
            (
                MOST.format(op="MAX"),
                LOSSES.format(batches="batches + [batches[0]] * (int(most) - len(batches))") + "[: len(batches)]",
                TOTAL,
            ),
            "when rank . has no batch at all: eval_loss raised IndexError",
            "The filler is there for every rank",
            id="its own first batch",
        ),
    ],
)
def test_wrong_evaluations_are_refused_and_a_hang_is_explained(
    pool: labkit.WorkerPool, lines: tuple[str, ...], measured: str, hint: str
) -> None:
    pool.run_cell(evaluation(*lines))
    with pytest.raises(ExerciseError, match=measured) as caught:
        check_eval_loss(pool)
    assert hint in str(caught.value)


@pytest.mark.parametrize("pool", [4], indirect=True)
def test_a_slow_right_answer_is_not_called_a_hang(pool: labkit.WorkerPool) -> None:
    slow = exercise("eval_loss").replace("    for place in", "    import time\n    for place in", 1)
    pool.run_cell(slow.replace("        if place <", "        time.sleep(0.5)\n        if place <", 1))
    with pytest.raises(ExerciseError, match="eval_loss does not come back: the run did not finish in 1 s") as caught:
        lab04.check_eval_loss(pool, timeout_s=1.0)
    assert "may be a slow machine, not a hang" in str(caught.value)
    assert "a longer timeout_s helps" in str(caught.value)


@pytest.mark.parametrize("name", ["same_training", "eval_loss"])
def test_a_check_before_its_exercise_says_what_is_missing(pool: labkit.WorkerPool, name: str) -> None:
    pool.run_cell(f"globals().pop({name!r}, None)")
    with pytest.raises(ExerciseError, match=f"there is no {name} on rank"):
        lab04.check_same_training(pool) if name == "same_training" else check_eval_loss(pool)
