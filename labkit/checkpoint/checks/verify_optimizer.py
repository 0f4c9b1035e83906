"""Checks of an optimizer's state: complete, shaped like its parameters, with distinct moments and equal step counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from labkit.checkpoint.checks.findings import Report
from labkit.checkpoint.checks.moments import Piece, misshapen
from labkit.checkpoint.checks.verify_data import each
from labkit.checkpoint.data.models_beside import models_beside
from labkit.checkpoint.data.rank_shares import is_flat, model_shapes
from labkit.checkpoint.data.read import Reader, same_bits
from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.index.model import Checkpoint, Path_, TensorEntry, ValueEntry
from labkit.checkpoint.index.names import match_names
from labkit.checkpoint.index.sections import optimizer_roots, parameters_of_group, parts
from labkit.checkpoint.wording import counted, listed

_MOST_VALUES = 3
# Pieces that torch's optimizers always keep together for a parameter: Adam and its relatives, Adamax, Adadelta, Adagrad, ASGD,
# Rprop, Adafactor.
_TOGETHER = (
    frozenset({"step", "exp_avg", "exp_avg_sq"}),
    frozenset({"step", "exp_avg", "exp_inf"}),
    frozenset({"step", "square_avg", "acc_delta"}),
    frozenset({"step", "sum"}),
    frozenset({"step", "eta", "mu", "ax"}),
    frozenset({"step", "prev", "step_size"}),
    frozenset({"step", "row_var", "col_var"}),
)


def check_optimizer(
    checkpoint: Checkpoint, report: Report, trainable: set[str] | None = None, damaged: Collection[str] = ()
) -> None:
    """Check that each optimized parameter has state, and that each state belongs to a parameter.

    Args:
        checkpoint: An opened checkpoint.
        report: Receives the findings.
        trainable: A model's trainable parameters by canonical name, if there is a model to compare with.
        damaged: Files that another finding already reports as unreadable.
    """
    entries: list[TensorEntry | ValueEntry] = [*checkpoint.tensors.values(), *checkpoint.values.values()]
    for root in sorted(optimizer_roots(entries), key=str):
        prefix = ".".join(map(str, root))
        pieces: dict[str, set[str]] = defaultdict(set)
        tensors: list[Piece] = []
        named = set(_group_parameters(checkpoint, prefix, report, damaged))
        for entry in entries:
            keys = parts(entry)
            if keys[: len(root)] == root and len(keys) > len(root) + 2 and keys[len(root)] == "state":
                name, piece = _split(list(map(str, keys[len(root) + 1 :])), named)
                pieces[name].add(piece)
                if isinstance(entry, TensorEntry) and not is_flat(entry):
                    tensors.append(Piece(entry.key, name, piece, entry.shape))
        numbered = bool(pieces) and all(name.isdigit() for name in pieces)
        if numbered:
            report.warning(
                "numbered-state",
                prefix or checkpoint.path,
                "its state is numbered by position",
                "reordered parameters get each other's moments",
            )
        else:
            _compare_shapes(checkpoint, root, tensors, pieces, report)
        _compare_pieces(prefix, pieces, named, report)
        if trainable is not None and not numbered:
            # The optimizer's names contain wrappers like the model's.
            for name in sorted(trainable - set(match_names(pieces, trainable).values())):
                report.error(
                    "no-state",
                    f"{prefix}.state.{name}",
                    "the parameter is trainable and has no optimizer state",
                    "it starts again from zero moments",
                )


def _split(keys: list[str], named: Collection[str]) -> tuple[str, str]:
    """Return a parameter's name and its piece of state. A piece may be a list of tensors, as in LBFGS."""
    for end in range(len(keys) - 1, 0, -1):
        if ".".join(keys[:end]) in named:
            return ".".join(keys[:end]), keys[end]
    return ".".join(keys[:-1]), keys[-1]


def _compare_shapes(
    checkpoint: Checkpoint, root: Path_, tensors: Sequence[Piece], pieces: Mapping[str, set[str]], report: Report
) -> None:
    inner = [model.shapes for level in models_beside(checkpoint, root)[:-1] for model in level]
    for piece, shape in misshapen(tensors, pieces, [*inner, *model_shapes(checkpoint)]):
        if not _is_share(checkpoint, checkpoint.tensors[piece.key], prod(shape)):
            report.error(
                "misshapen-state",
                piece.key,
                f"it has shape {piece.shape}, and the parameter has {shape}",
                "it is another parameter's, or the optimizer fails at its next step",
            )


def _is_share(checkpoint: Checkpoint, entry: TensorEntry, whole: int) -> bool:
    """Return whether the ranks' files hold stretches of a moment whose lengths add up to the parameter's."""
    stretches = sum(chunk.numel for table in (entry.chunks, *entry.replicas) for chunk in table)
    return len(checkpoint.ranks) > 1 and len(entry.shape) == 1 and stretches == whole


def _compare_pieces(prefix: str, pieces: dict[str, set[str]], named: set[str], report: Report) -> None:
    for name in sorted(named - pieces.keys()) if pieces else ():
        report.warning(
            "no-state",
            f"{prefix}.state.{name}",
            "the parameter is in a group and has no state",
            "it starts again from zero moments, unless it never had a gradient",
        )
    for name in sorted(pieces.keys() - named) if named else ():
        report.error(
            "stranger-state", f"{prefix}.state.{name}", "it has state and is in no parameter group", "its state is dropped on load"
        )
    kinds = {frozenset(found) for found in pieces.values()}
    for name, found in sorted(pieces.items()):
        lost = _lost_pieces(found, kinds)
        fewer = sorted(set().union(*(kind for kind in kinds if kind > found)) - found)
        if lost:
            report.error(
                "partial-state",
                f"{prefix}.state.{name}",
                f"it lacks {', '.join(lost)}, which others have",
                "the optimizer fails at its next step, or starts those anew",
            )
        elif fewer:
            report.warning(
                "uneven-state",
                f"{prefix}.state.{name}",
                f"it lacks {', '.join(fewer)}, which others have",
                "none, if its group's options or its shape are the reason; else the optimizer fails at its next step",
            )


def _lost_pieces(found: set[str], kinds: Collection[frozenset[str]]) -> list[str]:
    """Return the pieces that a parameter must have had.

    An optimizer may keep different pieces for some parameters (amsgrad in one group, factored moments of matrices), so a difference
    alone proves nothing. Pieces count as lost in two cases: the parameter has one but lacks another of the pieces that torch's
    optimizers always keep together (:data:`_TOGETHER`), while some parameter has both; or it has only a step counter.
    """
    if found == {"step"}:
        return sorted(set().union(*kinds) - found)
    lost: set[str] = set()
    for family in _TOGETHER:
        moments = found & (family - {"step"})
        lost = lost.union(*(kind & family for kind in kinds if kind & moments))
    return sorted(lost - found)


def _group_parameters(checkpoint: Checkpoint, prefix: str, report: Report, damaged: Collection[str]) -> Iterator[str]:
    head = f"{prefix}.param_groups." if prefix else "param_groups."
    keys = [key for key in checkpoint.values if key.startswith(head)]
    lists = [key for key in keys if key.endswith(".params")]
    if any(checkpoint.values[key].file in damaged for key in lists):
        return  # some names are unknown, so state without a known parameter is not reported
    with Reader(checkpoint) as reader:
        for key in lists:
            try:
                yield from map(str, parameters_of_group(reader.value(key), key))
            except CheckpointError as error:
                report.error("unreadable", key, error, "the optimizer's groups cannot be restored")
    flattened = {key.removeprefix(head).rpartition(".")[0] for key in keys}
    if not lists:  # flatten_optimizer_state_dict: param_groups.<fqn>.lr
        yield from (name for name in flattened if not name.isdigit())


def check_moments(checkpoint: Checkpoint, report: Report, workers: int, reader: Reader | None = None) -> None:
    """Report first and second moments with identical bits: FSDP1's full optimizer state on the CPU shares one buffer for both."""
    pairs = []
    for key, entry in checkpoint.tensors.items():
        other = checkpoint.tensors.get(f"{key}_sq") if key.endswith(".exp_avg") else None
        if entry.section == "optimizer" and other is not None and other.numel and other.shape == entry.shape:
            pairs.append((entry, other))

    def check(pair: tuple[TensorEntry, TensorEntry], reader: Reader) -> None:
        left, right = pair
        report.count("pairs of moments")
        try:
            if left.tied_to is None and right.tied_to is None and not _first_rows_equal(reader, left, right):
                return
            mean, square = reader.tensor(left.key), reader.tensor(right.key)
        except CheckpointError:
            return  # another check reports what cannot be read
        if same_bits(mean, square) and bool(mean.any()):
            report.error(
                "shared-moments",
                left.key,
                f"it has the same bits as {right.key.rsplit('.', 1)[-1]}",
                "Adam goes on with a wrong first moment (FSDP1's full optimizer state on the CPU does this)",
            )

    each(pairs, check, reader or checkpoint, workers)


def _first_rows_equal(reader: Reader, left: TensorEntry, right: TensorEntry) -> bool:
    sizes = (min(left.shape[0], 1), *left.shape[1:]) if left.shape else ()
    zeros = (0,) * len(left.shape)
    return same_bits(reader.box(left, zeros, sizes), reader.box(right, zeros, sizes))


def check_steps(checkpoint: Checkpoint, report: Report, workers: int) -> None:
    """Warn if step counters of one optimizer disagree: nothing else shows that the files come from two saves.

    It is only a warning, because a parameter that was unfrozen later, or does not always get a gradient, rightly has a lower count.
    A mixture goes undetected if each file has either all the counters or none.
    """
    entries: list[TensorEntry | ValueEntry] = [*checkpoint.tensors.values(), *checkpoint.values.values()]
    counts: dict[Path_, list[tuple[float, str]]] = {root: [] for root in sorted(optimizer_roots(entries), key=str)}

    def read(job: tuple[Path_, TensorEntry | ValueEntry], reader: Reader) -> None:
        root, entry = job
        try:
            steps = reader.tensor(entry.key).item() if isinstance(entry, TensorEntry) else reader.value(entry.key)
        except CheckpointError:
            return  # another check reports what cannot be read
        if isinstance(steps, int | float):
            counts[root].append((steps, entry.chunks[0].file if isinstance(entry, TensorEntry) else entry.file))
            report.count("step counters")

    each([(root, entry) for root in counts for entry in entries if _is_counter(entry, root)], read, checkpoint, workers)
    for root, found in counts.items():
        if len({steps for steps, _ in found}) > 1:
            report.warning(
                "uneven-steps",
                ".".join(map(str, root)) or checkpoint.path,
                f"its step counters disagree: {_by_value(found)}",
                "if a file is from another save, training continues from a mixture of two steps. A parameter that was unfrozen "
                "later rightly counts less",
            )


def _is_counter(entry: TensorEntry | ValueEntry, root: Path_) -> bool:
    keys = parts(entry)
    below = keys[len(root) :]
    single = isinstance(entry, ValueEntry) or entry.numel == 1
    return single and keys[: len(root)] == root and len(below) > 2 and below[0] == "state" and below[-1] == "step"


def _by_value(found: list[tuple[float, str]]) -> str:
    files: dict[float, list[str]] = defaultdict(list)
    for steps, file in found:
        files[steps].append(file)
    often = sorted(files, key=lambda steps: (-len(files[steps]), steps))
    told = [f"{steps:,.12g} ({counted(len(files[steps]), 'counter')} in {listed(sorted({*files[steps]}))})" for steps in often]
    return listed(told, most=_MOST_VALUES) + (" values" if len(told) > _MOST_VALUES else "")
