"""Errors carry fields, build their message from them, and arrive whole in another process."""

from __future__ import annotations

import inspect
import pickle
import re
from typing import Any

import cloudpickle
import pytest

from labkit import errors
from labkit.errors import (
    LabkitError,
    RankFailedError,
    RankFailure,
    RunInterrupted,
    RunReport,
    RunTimeoutError,
    WorkerDiedError,
    WorkerStartError,
)


def raised(rank: int, message: str = "boom", traceback: str = "line 3\nValueError: boom") -> RankFailure:
    return RankFailure(rank, "exception", "ValueError", message, traceback)


def stopped(rank: int) -> RankFailure:
    return RankFailure(rank, "interrupted", "KeyboardInterrupt", "", "where it waited")


def died(rank: int) -> RankFailure:
    return RankFailure(rank, "died", "SIGKILL", "its process was ended by SIGKILL", exitcode=-9, last_output="step 7\nstep 8")


def rendered(report: RunReport) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(report._render_traceback_()))


ERRORS: list[BaseException] = [
    RankFailedError([raised(1), stopped(0)], finished=(2, 3), notes=["a note."]),
    WorkerDiedError([died(2)], finished=(0, 1)),
    RunTimeoutError([stopped(0)], timeout_s=2.5),
    RunInterrupted([stopped(0), stopped(1)]),
    errors.OpenCollectiveError([errors.LeftOpen("all_reduce", 3, "the default group", (0,), (1, 2))], finished=(0, 1, 2)),
    WorkerStartError("it ended", rank=1, exitcode=3, stderr_tail="ImportError: no module"),
    errors.RankSpecError("rank 9 out of range"),
    errors.PoolStateError("the pool is closed"),
    errors.InvalidPoolError("world_size is 0"),
    errors.InvalidRunError("timeout_s is -1"),
    errors.WireError("cannot be sent"),
    errors.StrangerError(1234, "mallory", 29500, answered=True),
    errors.ExerciseError("off by 3"),
    errors.UnsolvedError("f is not solved yet"),
    errors.CheckpointError("no metadata"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_error_survives_pickling_with_fields_and_message(error: BaseException, pickler: Any) -> None:
    error.__notes__ = ["added later"]
    copy = pickle.loads(pickler.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_of_the_package_is_in_the_list_above() -> None:
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BaseException)}
    assert kinds - {LabkitError, RunReport, errors.RunError} == {type(error) for error in ERRORS}


def test_all_but_the_interrupt_are_labkit_errors() -> None:
    assert all(isinstance(error, LabkitError) for error in ERRORS if not isinstance(error, RunInterrupted))
    assert not issubclass(RunInterrupted, Exception)
    assert issubclass(RunInterrupted, KeyboardInterrupt)


def test_message_names_failed_interrupted_and_finished_ranks() -> None:
    error = RankFailedError([raised(1), raised(2), stopped(4)], finished=(0, 3), notes=["The groups were rebuilt."])
    assert str(error).splitlines() == [
        "ranks 1-2: ValueError: boom",
        "rank 4 did not finish and had to be interrupted; ranks 0, 3 finished.",
        "The groups were rebuilt.",
    ]
    assert error.failed_ranks == (1, 2)
    assert error.interrupted_ranks == (4,)
    assert error.finished == (0, 3)


def test_c2_open_collective_names_who_has_begun_it_and_who_has_not() -> None:
    error = next(error for error in ERRORS if isinstance(error, errors.OpenCollectiveError))
    assert "rank 0 has begun all_reduce #3 of the default group, ranks 1-2 have not." in str(error)
    assert error.failed_ranks == error.interrupted_ranks == ()


def test_headline_takes_the_first_line_of_a_long_message() -> None:
    assert raised(0, "first\nsecond").headline() == "ValueError: first"
    assert RankFailure(0, "exception", "AssertionError", "").headline() == "AssertionError"


def test_same_traceback_is_shown_once_with_all_its_ranks() -> None:
    text = rendered(RankFailedError([raised(rank) for rank in range(4)]))
    assert text.count("line 3") == 1
    assert text.startswith("ranks 0-3\n")
    assert "RankFailedError: ranks 0-3: ValueError: boom" in text


def test_different_traceback_is_never_hidden() -> None:
    other = RankFailure(2, "exception", "KeyError", "'w'", "line 9\nKeyError: 'w'")
    text = rendered(RankFailedError([raised(0), raised(1), other, raised(3)]))
    assert "ranks 0-1, 3\nline 3" in text
    assert "rank 2\nline 9" in text
    assert "rank 2: KeyError: 'w'" in text


def test_same_text_from_different_lines_is_shown_for_both() -> None:
    text = rendered(RankFailedError([raised(0, traceback="line 3"), raised(1, traceback="line 5")]))
    assert "line 3" in text
    assert "line 5" in text


def test_interrupted_rank_comes_after_the_cause_and_without_its_traceback() -> None:
    error = RankFailedError([stopped(0), raised(1)])
    assert [ranks for ranks, _ in error.grouped()] == [[1], [0]]
    assert "where it waited" not in rendered(error)


def test_death_shows_the_last_output() -> None:
    text = rendered(WorkerDiedError([died(2)], finished=(0, 1)))
    assert "    step 7\n    step 8" in text
    assert "rank 2: died (SIGKILL): its process was ended by SIGKILL" in text


def test_last_words_of_each_dead_rank_are_shown() -> None:
    other = RankFailure(3, "died", "SIGKILL", "its process was ended by SIGKILL", exitcode=-9, last_output="out of memory")
    text = rendered(WorkerDiedError([died(2), other]))
    assert "step 8" in text
    assert "out of memory" in text


def test_timeout_says_how_long_and_what_was_raised() -> None:
    error = RunTimeoutError([raised(1), stopped(0)], timeout_s=2.5)
    assert str(error).splitlines()[0] == "the run did not finish in 2.5 s; rank 1: ValueError: boom"


def test_start_error_names_rank_reason_and_last_output() -> None:
    text = str(WorkerStartError("it ended with exit code 3", rank=1, exitcode=3, stderr_tail="a\nb"))
    assert text.splitlines()[:4] == ["rank 1 did not start: it ended with exit code 3", "Its last output:", "    a", "    b"]
    assert "No worker is left running" in text
    assert str(WorkerStartError("time")).startswith("the pool did not start: time")
