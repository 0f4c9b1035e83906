"""Exercise 2 of notebook 05: a linter for tensor-parallel plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from labkit.course.labs.checks import ask, refuse
from labkit.errors import ExerciseError

Lint = Callable[[Mapping[str, Any], Any, int], Set[str]]


@dataclass(frozen=True)
class PlanCase:
    """A plan, the number of ranks that it is for, its bad keys, and the hint for a wrong answer."""

    what: str
    plan: Mapping[str, Any]
    model: Any
    tp_size: int
    bad: frozenset[str]
    hint: str


def check_plan_linter(lint: Lint) -> str:
    """Exercise 2: ``lint(plan, model, tp_size)`` returns the keys that match no module or split a size that does not divide.

    Args:
        lint: Takes a plan, a model whose split modules are ``nn.Linear``, and the number of TP ranks. Returns a set of keys.

    Returns:
        A line with the number of plans.

    Raises:
        ExerciseError: A bad key is missed or a good one is reported; the message names the plan's flaw.

    Ranks: controller.
    """
    cases = _cases()
    for case in cases:
        found = _as_keys(_asked(lint, case))
        if found != case.bad:
            said, wanted = (", ".join(sorted(keys)) or "nothing" for keys in (found, case.bad))
            refuse(f"{case.what}, {case.tp_size} TP ranks: lint reports {said}.", f"{wanted}.", case.hint)
    return f"Solved: {len(cases)} plans judged correctly, {sum(bool(case.bad) for case in cases)} of them bad."


def plan_case(what: str) -> tuple[dict[str, Any], Any, int]:
    """Return the arguments of one of `check_plan_linter`'s cases: plan, model and number of TP ranks.

    Args:
        what: The case's name in the check.

    Ranks: controller.
    """
    (case,) = (case for case in _cases() if case.what == what)
    return dict(case.plan), case.model, case.tp_size


def _asked(lint: Lint, case: PlanCase) -> Any:
    """Call ``lint`` and return its result. The case, for messages, is a call that works in a cell."""
    try:
        return ask(lint, dict(case.plan), case.model, case.tp_size, case=f"lint(*lab05.plan_case({case.what!r}))")
    except ExerciseError as error:
        if isinstance(error.__cause__, AttributeError) and "'weight'" in str(error.__cause__):
            hint = (
                "A key has matched a module that is not a Linear. A name needs as many parts as the key: layers.* ends at the "
                "layers, and zip stops at the shorter of two lists."
            )
            raise ExerciseError(f"{error}\nHint: {hint}") from error.__cause__
        raise


def _as_keys(answer: Any) -> frozenset[str]:
    if not isinstance(answer, Set):
        raise ExerciseError(f"lint returned {answer!r}. It has to return a set of keys of the plan.")
    if others := [one for one in answer if not isinstance(one, str)]:
        raise ExerciseError(f"lint returned a set with {others[0]!r} in it. It has to return keys of the plan, such as 'layers.*'.")
    return frozenset(answer)


def _cases() -> list[PlanCase]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from labkit.spmd import ModelConfig, build_model
    from labkit.spmd.shards.tensor_parallel import lint_plan, tensor_parallel_plan

    model = build_model(device="meta")
    uneven = build_model(ModelConfig(dim=24, hidden_dim=90), device="meta")
    first, last = build_model(device="meta"), build_model(device="meta")
    first.layers[0].feed_forward.w1 = _linear(64, 191)  # type: ignore[union-attr]
    last.layers[2].feed_forward.w1 = _linear(64, 191)  # type: ignore[union-attr]
    good = tensor_parallel_plan()
    columns, rows = ColwiseParallel(), RowwiseParallel()
    all_keys = "Report every bad key and nothing else."
    table: list[tuple[str, dict[str, Any], Any, int, str]] = [
        ("the course's plan", good, model, 2, "Nothing is wrong with this plan. Do you handle a pattern such as layers.*?"),
        ("a typo", {**good, "layers.*.attention.w0": rows}, model, 2, "A key that names no module has to be reported."),
        (
            "a pattern that skips a level",
            {"layers.*.wq": columns, "layers.*.attention.wk": columns},
            model,
            2,
            "torch matches level by level: a star stands for one name between dots, and fnmatch on the whole name takes more.",
        ),
        (
            "a pattern that ends too early",
            {"layers.*.attention.wq.weight": columns, "head.*": columns},
            model,
            2,
            "A plan names modules. wq.weight is a parameter, and head has no modules inside.",
        ),
        (
            "hidden size 90",
            good,
            uneven,
            4,
            "Column-parallel cuts the rows of weight, row-parallel its columns: 90 of them, on 4 ranks.",
        ),
        (
            "more columns than rows",
            {"layers.*.feed_forward.w2": rows, "layers.*.feed_forward.w1": columns},
            build_model(ModelConfig(dim=24, hidden_dim=90), device="meta"),
            4,
            "Which dim is cut? w2.weight is 24 x 90, and row-parallel cuts its columns.",
        ),
        (
            "only rows divide",
            {"layers.*.feed_forward.w2": columns, "layers.*.feed_forward.w1": rows},
            uneven,
            4,
            "Here the styles are the other way round, and the dims that they cut do divide. ColwiseParallel cuts dim 0 of weight.",
        ),
        ("an odd last layer", good, last, 2, "A pattern matches several modules. Look at all of them, including the last."),
        ("an odd first layer", good, first, 2, "A pattern matches several modules. Look at all of them, including the first."),
        (
            "patterns with a set and a question mark",
            {"layers.[01].feed_forward.w[13]": columns, "layers.*.attention.w?": columns, "layers.*.feed_forward.w[45]": columns},
            model,
            2,
            "A star is not the only pattern: fnmatchcase also knows w[13] and w?, and there is neither a w4 nor a w5.",
        ),
        (
            "a part of a name",
            {"layers.*.attention.w": columns, "layers.*.attention.wq_": columns, "layer.*.attention.wk": columns},
            model,
            2,
            "A pattern has to match the whole name between two dots: w is not wq.",
        ),
    ]
    cases = []
    for what, plan, on, tp_size, hint in table:
        bad = frozenset(finding.key for finding in lint_plan(on, plan, tp_size) if finding.kind in ("unmatched", "uneven"))
        cases.append(PlanCase(what, plan, on, tp_size, bad, hint or all_keys))
    return cases


def _linear(num_in: int, num_out: int) -> Any:
    from torch import nn

    return nn.Linear(num_in, num_out, bias=False, device="meta")
