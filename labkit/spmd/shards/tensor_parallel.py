"""Plans for tensor parallelism: one for the course's model, and a linter for any plan, because torch only warns about typos."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal, NamedTuple

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from labkit.checkpoint.index.layout import split
from labkit.errors import LabkitError

FindingKind = Literal["unmatched", "uneven", "heads", "tied", "twice"]


@dataclass(frozen=True)
class PlanFinding:
    """One problem of a plan.

    Attributes:
        key: The plan's key.
        kind: ``unmatched`` (no such module), ``uneven`` (a size does not divide, and a plain tensor would lose it, or a rank would
            get nothing), ``heads`` (attention heads would be split), ``tied`` (a tied parameter would become two), ``twice`` (an
            earlier key has already split the module).
        detail: The finding in words.
    """

    key: str
    kind: FindingKind
    detail: str


class ParallelPlanError(LabkitError, ValueError):
    """A tensor-parallel plan does not fit the model; the model has not been changed.

    Attributes:
        findings: The problems, in the plan's order.
    """

    def __init__(self, findings: tuple[PlanFinding, ...]) -> None:
        self.findings = findings
        lines = [f"  {finding.key}: {finding.detail}" for finding in findings]
        super().__init__("\n".join([f"the tensor-parallel plan does not fit the model. Findings: {len(lines)}", *lines]))

    def __reduce__(self) -> tuple[type[ParallelPlanError], tuple[tuple[PlanFinding, ...]]]:
        return type(self), (self.findings,)


def tensor_parallel_plan(layers: str = "layers.*") -> dict[str, ParallelStyle]:
    """Return the plan for the course's transformer: split ``wq wk wv w1 w3`` by rows, ``wo w2`` by columns.

    torch names the styles after the product ``x @ W.T``, so *column*-parallel means split rows of ``weight``. Between a
    column-parallel layer and the row-parallel one after it, a rank has only its own heads or hidden features, and one all-reduce
    follows the pair (Shoeybi et al., 2019, arXiv:1909.08053). Norms, embedding and head stay whole on every TP rank: embedding and
    head are one tied parameter, which two keys of a plan would untie.

    Args:
        layers: Pattern of the blocks.

    Ranks: local.
    """
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    rows = ("attention.wo", "feed_forward.w2")
    plan: dict[str, ParallelStyle] = {f"{layers}.{name}": ColwiseParallel() for name in columns}
    return plan | {f"{layers}.{name}": RowwiseParallel() for name in rows}


def check_plan(model: nn.Module, plan: Mapping[str, ParallelStyle], tp_size: int, *, dp_size: int = 1) -> None:
    """Refuse a plan in which `lint_plan` finds a problem.

    Raises:
        ParallelPlanError: There are findings; it holds all of them.

    Ranks: local; equal on all ranks.
    """
    if findings := tuple(lint_plan(model, plan, tp_size, dp_size=dp_size)):
        raise ParallelPlanError(findings)


def lint_plan(model: nn.Module, plan: Mapping[str, ParallelStyle], tp_size: int, *, dp_size: int = 1) -> Iterator[PlanFinding]:
    """Find what torch would skip with only a warning, silently untie, or fail on only in the first forward.

    Args:
        model: The whole model, possibly on the meta device.
        plan: Keys as ``parallelize_module`` reads them: one pattern per level, so ``layers.*`` ends at the layers.
        tp_size: Ranks in a TP group.
        dp_size: Ranks over which FSDP further splits the rows of each piece.

    Yields:
        Findings in the plan's order. Sizes are checked for ``nn.Linear`` and ``nn.Embedding`` under the two basic styles; for other
        styles and modules, only the key's match is. A size that does not divide is a finding if the layer takes or returns a plain
        tensor, because torch assumes that the whole size is the local size times the number of ranks. It is also a finding if FSDP
        splits the pieces further in a way that torch's checkpoint cannot save.

    Ranks: local.
    """
    styles: dict[nn.Module, str] = {}
    placed = set(_placed_features(model, plan))
    for key, style in plan.items():
        matched = match_modules(model, key)
        if not matched:
            yield PlanFinding(key, "unmatched", "no module has this name; torch would warn and leave it whole on every rank")
        for name, module in matched.items():
            if module in styles and isinstance(style, ColwiseParallel | RowwiseParallel):
                yield PlanFinding(key, "twice", f"{name} is split by {styles[module]!r} already")
            styles[module] = key
            yield from _findings(model, key, style, name, module, _Axes(tp_size, dp_size), placed)


class _Axes(NamedTuple):
    """The number of ranks on the TP axis and on the FSDP axis."""

    tp: int
    dp: int


def match_modules(model: nn.Module, key: str) -> dict[str, nn.Module]:
    """Return the modules that a plan's key matches, level by level as in ``parallelize_module``. Ranks: local."""
    if not key:
        return {"": model}
    found: dict[str, nn.Module] = {"": model}
    for pattern in key.split("."):
        found = {
            f"{prefix}.{name}" if prefix else name: child
            for prefix, module in found.items()
            for name, child in module.named_children()
            if fnmatch(name, pattern)
        }
    return found


def _placed_features(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> Iterator[tuple[str, int]]:
    """Yield the parent module's name and the number of features for each column-parallel layer that returns a DTensor."""
    for key, style in plan.items():
        if isinstance(style, ColwiseParallel) and not style.use_local_output:
            for name, module in match_modules(model, key).items():
                if isinstance(module, nn.Linear):
                    yield name.rpartition(".")[0], module.out_features


def _pieces(size: int, num: int) -> list[int]:
    """Return the sizes of the pieces that torch splits a size into."""
    return [split(size, num, at)[1] for at in range(num)]


def _uneven(style: ParallelStyle, size: int, dim: int, axes: _Axes, placed: bool) -> str:
    """Explain what is wrong with a size that does not divide; return an empty string if nothing is.

    Args:
        style: One of the two basic styles.
        size: Number of rows or columns that the style splits.
        dim: 0 for rows, 1 for columns.
        axes: Numbers of ranks on both axes.
        placed: Whether a row-parallel layer gets its input from a column-parallel layer that keeps placements.
    """
    if not size % axes.tp:
        return ""
    if not all(pieces := _pieces(size, axes.tp)):
        return "a rank would get none, which fails in FSDP's backward"
    # To save, torch joins the rows at one dp coordinate and splits them again over tp, but FSDP split each TP piece separately.
    held = zip(*(_pieces(piece, axes.dp) for piece in pieces), strict=True)
    if dim == 0 and any(list(rows) != _pieces(sum(rows), axes.tp) for rows in held):
        return f"over {axes.dp} ranks on dp torch puts the rows of some ranks in the wrong place, and its checkpoint fails"
    if isinstance(style, ColwiseParallel):
        is_lost = style.use_local_output and Shard(-1) in style.output_layouts
        return "use_local_output=False would keep the size" if is_lost else ""
    is_lost = isinstance(style, RowwiseParallel) and Shard(-1) in style.input_layouts and not placed
    return "use_local_output=False in the layer before it, or input_layouts=Replicate(), would keep the size" if is_lost else ""


def _findings(
    model: nn.Module,
    key: str,
    style: ParallelStyle,
    name: str,
    module: nn.Module,
    axes: _Axes,
    placed: Collection[tuple[str, int]],
) -> Iterator[PlanFinding]:
    dim = _split_dim(style, module)
    if dim is None:
        return
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    size = weight.shape[dim]
    if fault := _uneven(style, size, dim, axes, (name.rpartition(".")[0], size) in placed):
        what = "rows" if dim == 0 else "columns"
        detail = f"{size} {what} of {name}.weight cannot be spread evenly over {axes.tp} TP ranks; {fault}"
        yield PlanFinding(key, "uneven", detail)
    elif isinstance(style, ColwiseParallel) and (head_dim := _head_dim(model, name)) and -(-size // axes.tp) % head_dim:
        detail = f"{size // head_dim} heads of {head_dim} rows cannot be spread evenly over {axes.tp} TP ranks"
        yield PlanFinding(key, "heads", detail)
    owners = [other for other, owner in model.named_modules() if owner.__dict__.get("_parameters", {}).get("weight") is weight]
    if len(owners) > 1:
        others = ", ".join(f"{other}.weight" for other in owners if other != name)
        yield PlanFinding(key, "tied", f"{name}.weight is also {others}; splitting it here would leave two parameters")


def _split_dim(style: ParallelStyle, module: nn.Module) -> int | None:
    """Return the dim of ``weight`` that a style splits; None if unknown."""
    by_rows = isinstance(style, ColwiseParallel)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return None
    if isinstance(module, nn.Linear):
        return 0 if by_rows else 1
    if isinstance(module, nn.Embedding):
        return 1 if by_rows else 0
    return None


def _head_dim(model: nn.Module, name: str) -> int | None:
    """Return the rows per head if the module around a projection has ``head_dim``, as the course's attention does."""
    parent = model.get_submodule(name.rpartition(".")[0])
    head_dim = getattr(parent, "head_dim", None)
    return head_dim if isinstance(head_dim, int) else None
