"""Whether the parameters of one optimizer have counted the same number of steps."""

from __future__ import annotations

from collections import defaultdict

from labkit.checkpoint.errors import CheckpointError
from labkit.checkpoint.findings import Report
from labkit.checkpoint.model import Checkpoint, Path_, TensorEntry, ValueEntry
from labkit.checkpoint.read import Reader
from labkit.checkpoint.sections import optimizer_roots, parts
from labkit.checkpoint.verify_data import each
from labkit.checkpoint.wording import counted, listed

_MOST_VALUES = 3


def check_steps(checkpoint: Checkpoint, report: Report, workers: int) -> None:
    """Step counters of one optimizer agree: files of two saves in one checkpoint may show here, and nowhere else.

    A warning, since a parameter that was unfrozen later, or has no gradient in every step, counts less by right. Files that all
    lack counters, or hold all of them, are not told apart.
    """
    entries: list[TensorEntry | ValueEntry] = [*checkpoint.tensors.values(), *checkpoint.values.values()]
    counts: dict[Path_, list[tuple[float, str]]] = {root: [] for root in sorted(optimizer_roots(entries), key=str)}

    def read(job: tuple[Path_, TensorEntry | ValueEntry], reader: Reader) -> None:
        root, entry = job
        try:
            steps = reader.tensor(entry.key).item() if isinstance(entry, TensorEntry) else reader.value(entry.key)
        except CheckpointError:
            return  # what cannot be read is another check's finding
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
                "if a file is from another save, training goes on from a mixture of two steps. A parameter that was unfrozen later "
                "counts less by right",
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
