"""Reports of names missing on one side of a comparison; names missing for the same reason form one finding."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from labkit.checkpoint.checks.findings import Report
from labkit.checkpoint.index.model import Checkpoint
from labkit.checkpoint.index.names import match_names
from labkit.checkpoint.index.prefixes import PrefixChange, prefix_change
from labkit.checkpoint.index.sections import model_nests, name_in, nest_of
from labkit.checkpoint.wording import counted, listed

NOT_THE_SAME = "the two are not the same state"
_UNLOADED = "what the checkpoint lacks keeps its random initialisation with strict=False"
_MOST_FINDINGS = 5
_NUMBERED = re.compile(r"optimizer\.[0-9]+\.[^.]+")


def report_misfit(
    checkpoint: Checkpoint, expected: Collection[str], missing: Sequence[str], unexpected: Sequence[str], report: Report
) -> None:
    """Report the names that a model or its checkpoint lacks, as one finding if changing one prefix makes them all match.

    Args:
        checkpoint: The checkpoint.
        expected: The model's names.
        missing: Those that the checkpoint lacks.
        unexpected: Those that the model lacks.
        report: Receives the findings.
    """
    change = _change_to_model(checkpoint, expected) if missing and unexpected else None
    if change is None:
        _report_names(report, "missing-key", checkpoint.path, missing, "the model has {} and the checkpoint lacks {}", _UNLOADED)
        what = "the checkpoint has {} and the model lacks {}"
        _report_names(report, "unexpected-key", checkpoint.path, unexpected, what, "DCP ignores {}")
        return
    names, prefix = change
    what = f"{len(names)} names have another prefix than the model's: {names[0]} here, {prefix.apply(names[0])} in the model"
    report.error("missing-key", checkpoint.path, f"{what}. {prefix.advice}", _UNLOADED)


def report_alone(checkpoint: Checkpoint, other: Checkpoint, left: list[str], right: list[str], report: Report) -> None:
    """Report the names that one of two checkpoints lacks; names that differ for the same reason form one finding."""
    numbered = [[name for name in names if _NUMBERED.fullmatch(name)] for names in (left, right)]
    named = [[name for name in names if name.startswith("optimizer.") and not _NUMBERED.fullmatch(name)] for names in (left, right)]
    for numbers, names, sides in ((numbered[0], named[1], (checkpoint, other)), (numbered[1], named[0], (other, checkpoint))):
        if numbers and names:
            by_number, by_name = (listed([name.removeprefix("optimizer.") for name in side]) for side in (numbers, names))
            what = (
                f"{counted(len(numbers), 'tensor')} of optimizer state go by numbers in {sides[0].path} ({by_number}) and by "
                f"names in {sides[1].path} ({by_name}), so they were not compared. To compare them, migrate the numbered one with "
                "--model first"
            )
            report.error("numbered-state", checkpoint.path, what, "whether the two are the same state is not known")
            left = [name for name in left if name not in {*numbers, *names}]
            right = [name for name in right if name not in {*numbers, *names}]
    change = prefix_change(left, right, lambda renamed: set(renamed) == set(right))
    if change is not None:
        what = f"{len(left)} names have another prefix in {other.path}: {left[0]} here, {change.apply(left[0])} there"
        report.error("missing-key", checkpoint.path, what, NOT_THE_SAME)
        return
    _report_names(report, "missing-key", checkpoint.path, left, f"{other.path} lacks {{}}", NOT_THE_SAME)
    _report_names(report, "unexpected-key", checkpoint.path, right, f"only {other.path} has {{}}", NOT_THE_SAME)


def _change_to_model(checkpoint: Checkpoint, expected: Collection[str]) -> tuple[list[str], PrefixChange] | None:
    """Return the names of a nest and the prefix change that maps them all to the model's; None if no such change exists."""
    for nest in model_nests(checkpoint):
        names = [name_in(entry.path) for entry in checkpoint.section("model") if nest_of(entry.path) == nest]
        change = prefix_change(
            names, expected, lambda renamed: len(match_names(renamed, expected)) == len(renamed) == len(expected)
        )
        if change is not None:
            return names, change
    return None


def _report_names(report: Report, code: str, path: object, names: Sequence[str], what: str, consequence: str) -> None:
    """Report names that one side lacks: one finding each if there are few, else one finding for all.

    For a single name, ``{}`` in ``what`` and ``consequence`` becomes ``it``; for all together it becomes ``them``, but the first
    one in ``what`` becomes their number.
    """
    if len(names) <= _MOST_FINDINGS:
        for name in names:
            report.error(code, name, what.replace("{}", "it"), consequence.replace("{}", "it"))
        return
    text = what.replace("{}", counted(len(names), "tensor"), 1).replace("{}", "them")
    report.error(code, path, f"{text}: {listed(names)}", consequence.replace("{}", "them"))
