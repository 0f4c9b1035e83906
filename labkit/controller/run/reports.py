"""The error that reports a run that did not finish on every rank."""

from __future__ import annotations

from labkit.base.plain_text import name_ranks
from labkit.controller.run.run import Run
from labkit.errors import (
    OpenCollectiveError,
    RankFailedError,
    RankFailure,
    RunInterrupted,
    RunReport,
    RunTimeoutError,
    WorkerDiedError,
)


def raise_for(run: Run, timeout_s: float | None, ways_back: str) -> None:
    """Raise an error if a run that has ended went wrong.

    Args:
        run: The run.
        timeout_s: Its time limit.
        ways_back: What to do when a rank has died, in a sentence.

    Raises:
        RunReport: The run did not finish on every rank, or left a collective open.
    """
    finished = sorted(run.results)
    notes = list(run.steps)
    if run.left_open:
        raise OpenCollectiveError(run.left_open, finished, notes)
    if not run.failures:
        return  # it may have been stopped and have finished all the same
    failures = run.judged_failures()
    notes += _failed_handlers(run)
    judged = run.diagnosis is not None and run.diagnosis.kind not in ("idle", "working")
    verdict = run.diagnosis.verdict if run.diagnosis is not None and judged else _where_cut_off(run)
    if run.diagnosis is not None and run.diagnosis.kind == "running":
        verdict = f"It was stopped while running: {verdict}"
    report: RunReport
    if any(failure.kind == "died" for failure in failures):
        if run.stopped == "timeout":
            notes.insert(0, f"The run did not finish in {timeout_s:g} s.")
        report = WorkerDiedError(failures, finished, [*notes, ways_back], diagnosis=verdict)
    elif run.stopped == "timeout":
        report = RunTimeoutError(failures, finished, notes, diagnosis=verdict, timeout_s=timeout_s or 0.0)
    elif run.stopped == "interrupted":
        report = RunInterrupted(failures, finished, notes, diagnosis=verdict)
    else:
        report = RankFailedError(failures, finished, notes, diagnosis=verdict)
    raise report


def _failed_handlers(run: Run) -> list[str]:
    """Describe, in a sentence for each place, where the cell's own code for an interrupt has failed."""
    places: dict[str, list[RankFailure]] = {}
    for _, failure in sorted(run.failures.items()):
        if failure.in_handler:
            places.setdefault(f" at {failure.where}" if failure.where else "", []).append(failure)
    return [
        f"{name_ranks(tuple(failure.rank for failure in failures))}: the cell's own code for the interrupt{place} failed "
        f"({failures[0].headline()}). A stop gives such code 1.5 s and ends every collective; process groups work again only now, "
        "when all ranks have left the cell. What needs them, such as a save, belongs in a cell of its own."
        for place, failures in places.items()
    ]


def _where_cut_off(run: Run) -> str:
    """Describe in a sentence where ranks waited in a collective from which the end of another rank has freed them."""
    places: dict[str, list[int]] = {}
    for rank in sorted(run.cut_off):
        failure = run.failures.get(rank)
        if failure is not None and failure.where:
            places.setdefault(failure.where, []).append(rank)
    if not places or not set(run.failures) - run.cut_off:
        return ""
    parts = [f"{name_ranks(tuple(ranks))} waited in a collective at {place}" for place, ranks in places.items()]
    return "; ".join(parts) + "."
