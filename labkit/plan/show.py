"""Display of a plan: tables of memory, traffic and checkpoint."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from labkit.plan.records import CheckpointPlan, Plan, RankPlan, Traffic

_WIDTH = 140
_MEMORY = "Shards of parameters, gradients and optimizer state at the end of a step; activations when forward of --batch has ended."
_TRAFFIC = (
    "whole: the gathered or reduced tensors of all calls together. "
    "In a ring of n ranks a rank sends (n - 1) / n of it, in an all-reduce twice.\n"
    "Inside and between nodes: all ranks together. Out of a node: the most that leaves one."
)
_FILES = "items: what all ranks propose to write, copies included; shards: what is left, each written once."


def render(plan: Plan) -> RenderableType:
    """Return the plan as rich tables, for a terminal."""
    shape = " x ".join(f"{axis} {size:,}" for axis, size in zip(plan.mesh.axes, plan.mesh.shape, strict=True))
    nodes = f"{plan.num_nodes:,} node{'s' if plan.num_nodes != 1 else ''} of {plan.ranks_per_node}"
    head = f"{plan.num_parameters:,} parameters on {plan.world_size:,} ranks ({shape}), {nodes}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    parts += [Text(), _memory(plan), _legend(_MEMORY), Text(), _traffic(plan), _legend(_TRAFFIC)]
    if plan.checkpoint is not None:
        parts += [Text(), _checkpoint(plan.checkpoint), _legend(_FILES)]
    parts += [Text(f"note: {note}", style="yellow") for note in plan.notes]
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in plan.seconds.items())
    return Group(*parts, Text(), Text(f"torch {plan.torch_version}; planning took: {took}", style="dim"))


def as_text(plan: Plan) -> str:
    """Return the plan as plain text."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(render(plan))
    written: Any = console.file
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def size_text(size: float) -> str:
    """Format a size for people, with three digits: ``1.50 MiB``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("rank", "collective", "over") else "right", no_wrap=True)
    return table


def _legend(text: str) -> Text:
    return Text(text, style="dim")


def _memory(plan: Plan) -> Table:
    host, peak = any(each.host_bytes for each in plan.ranks), any(each.peak for each in plan.ranks)
    more = (*(["on the host"] if host else []), *(["peak"] if peak else []))
    table = _table("Bytes on a rank", "rank", "elements", "parameters", "gradients", "optimizer", "activations", "together", *more)
    for place, each in enumerate(plan.ranks):
        memory = each.memory
        sizes = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.total)
        row = [f"{each.rank} {_role(plan, place)}".rstrip(), f"{each.num_elements:,}", *map(size_text, sizes)]
        row += [size_text(each.host_bytes)] if host else []
        row += [size_text(each.peak.total) if each.peak else "-"] if peak else []
        table.add_row(*row)
    return table


def _role(plan: Plan, place: int) -> str:
    """Explain why a rank is listed; return an empty string if the job named it."""
    ranks: tuple[RankPlan, ...] = plan.ranks
    if place == 0:
        return "(all hold as much)" if len(ranks) == 1 else "(most)"
    least = min(each.num_elements for each in ranks)
    return "(least)" if place == 1 and ranks[1].num_elements == least < ranks[0].num_elements else ""


def _traffic(plan: Plan) -> Table:
    columns = (
        "collective",
        "over",
        "calls",
        "whole",
        "a rank sends",
        "inside nodes",
        "between nodes",
        "out of a node",
    )
    table = _table("A step's collectives", *columns)
    for each in plan.traffic:
        table.add_row(each.kind, _group_text(each), f"{each.num_calls:,}", *map(size_text, _sizes(each)))
    if len(plan.traffic) > 1:
        sums = [sum(column) for column in zip(*(_sizes(each) for each in plan.traffic), strict=True)]
        table.add_row("all", "", f"{sum(each.num_calls for each in plan.traffic):,}", *map(size_text, sums[:-1]), style="bold")
    return table


def _sizes(each: Traffic) -> tuple[int, ...]:
    return each.size_bytes, each.sent_bytes, each.inside_bytes, each.between_bytes, each.node_out_bytes


def _group_text(each: Traffic) -> str:
    nodes = "1 node" if each.num_nodes == 1 else f"{each.num_nodes:,} nodes"
    return f"{each.axis}: {each.group_size:,} ranks on {nodes}"


def _checkpoint(found: CheckpointPlan) -> Table:
    about = "" if found.exact else "about "
    table = _table("Checkpoint", "tensors", "files", "bytes of files", "shards", ".metadata", "planned on rank 0 in")
    empty = "" if not found.num_empty_files else f", {found.num_empty_files:,} empty"
    table.add_row(
        size_text(found.tensor_bytes),
        f"{found.num_files:,}{empty}",
        size_text(found.file_bytes),
        f"{found.num_shards:,} of {found.num_items:,} items",
        about + size_text(found.metadata_bytes),
        f"{about}{found.planning_s:.2f} s",
    )
    return table
