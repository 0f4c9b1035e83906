"""The table with which notebook 07 compares two plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from IPython.display import Markdown

from labkit.course.labs.lab07.tables import table
from labkit.plan.records import Plan

_MIB, _TIB = 1 << 20, 1 << 40


def plan_table(plans: Mapping[str, Plan]) -> Markdown:
    """Compare two plans that include a checkpoint, line by line, with the factor by which the second one differs.

    Args:
        plans: Two plans by name.

    Ranks: controller.
    """
    first, second = plans
    rows = []
    for what, value in _LINES.items():
        one, other = value(plans[first]), value(plans[second])
        rows.append((what, _text(one), _text(other), f"{other / one:,.3g}" if one else ""))
    return table(["", first, second, f"{second} / {first}"], rows)


def ring_steps(plan: Plan, *, inside: bool) -> int:
    """Count the sequential ring steps in a training step, either of rings inside nodes or of those across nodes.

    A ring of n ranks gathers or reduces in n - 1 steps; an all-reduce does both.
    """
    kinds = [each for each in plan.traffic if (each.num_nodes == 1) == inside]
    return sum(each.num_calls * (each.group_size - 1) * (2 if each.kind == "all_reduce" else 1) for each in kinds)


def _text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


_LINES: Mapping[str, Callable[[Any], float]] = {
    "parameters and buffers on a rank, MiB": lambda plan: plan.ranks[0].memory.parameters / _MIB,
    "gradients on a rank, MiB": lambda plan: plan.ranks[0].memory.gradients / _MIB,
    "optimizer on a rank, MiB": lambda plan: plan.ranks[0].memory.optimizer / _MIB,
    "between nodes in a step, TiB": lambda plan: plan.between_bytes / _TIB,
    "steps of rings inside nodes": lambda plan: ring_steps(plan, inside=True),
    "steps of rings over nodes": lambda plan: ring_steps(plan, inside=False),
    "checkpoint, MiB": lambda plan: plan.checkpoint.tensor_bytes / _MIB,
    "files": lambda plan: plan.checkpoint.num_files,
    "files with nothing in them": lambda plan: plan.checkpoint.num_empty_files,
    "pieces": lambda plan: plan.checkpoint.num_shards,
    "metadata, MiB": lambda plan: plan.checkpoint.metadata_bytes / _MIB,
}
