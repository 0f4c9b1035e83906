"""The board on which ranks see each other's optimizer steps, and the places where an interrupt may fall."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from labkit.worker.steps import step_board
from labkit.worker.steps.step_board import StepBoard

RUN = 7


@pytest.fixture
def boards(tmp_path: Path) -> list[StepBoard]:
    """Three ranks in one run, as three processes would open the file."""
    found = [StepBoard(str(tmp_path / "steps"), rank, 3) for rank in range(3)]
    for board in found:
        board.begin(RUN)
    return found


def step(board: StepBoard) -> None:
    board.step_begins()
    board.step_ends()


def test_a_rank_that_has_not_begun_the_step_of_another_goes_on_to_its_end(boards: list[StepBoard]) -> None:
    ahead, inside, behind = boards
    step(ahead)
    inside.step_begins()
    for board in boards:
        board.stop(RUN)
    assert [board.behind() for board in boards] == [False, True, True]
    step(behind)
    inside.step_ends()
    assert not any(board.behind() for board in boards)


def test_no_rank_begins_a_step_beyond_the_last_one_of_a_run_that_is_being_stopped(boards: list[StepBoard]) -> None:
    step(boards[0])
    boards[1].stop(RUN)  # whichever rank hears of it first
    with pytest.raises(KeyboardInterrupt):
        boards[0].step_begins()
    step(boards[2])
    with pytest.raises(KeyboardInterrupt):
        boards[2].step_begins()


def test_a_refused_step_counts_for_nobody(boards: list[StepBoard]) -> None:
    boards[0].stop(RUN)
    with pytest.raises(KeyboardInterrupt):
        boards[1].step_begins()
    boards[2].stop(RUN)
    assert not any(board.behind() for board in boards)


def test_the_next_run_begins_afresh(boards: list[StepBoard]) -> None:
    step(boards[0])
    boards[1].stop(RUN)
    for board in boards:
        board.end()
        board.begin(RUN + 1)
        step(board)
        step(board)
    assert not any(board.behind() for board in boards)


def test_an_interrupt_of_another_run_changes_nothing(boards: list[StepBoard]) -> None:
    boards[0].stop(RUN - 1)
    step(boards[0])
    assert not boards[1].behind()


def test_the_others_are_waited_for_until_they_have_caught_up(boards: list[StepBoard]) -> None:
    boards[0].step_begins()
    boards[0].step_ends()
    boards[2].end()  # it has left the run: nobody waits for it
    boards[0].stop(RUN)
    caught_up = threading.Event()

    def wait() -> None:
        boards[0].wait_for_others()
        caught_up.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not caught_up.is_set()
    step(boards[1])
    thread.join(step_board.CATCH_UP_S * 20)
    assert caught_up.is_set()


def test_a_rank_that_does_not_catch_up_is_not_waited_for_without_end(
    boards: list[StepBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_board, "CATCH_UP_S", 0.05)
    step(boards[0])
    boards[0].stop(RUN)
    boards[1].stop(RUN)
    boards[0].wait_for_others()
    deadline = time.monotonic() + 10
    while boards[1].behind() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not boards[1].behind()


def test_a_step_that_raised_is_over_when_the_next_one_begins(boards: list[StepBoard]) -> None:
    boards[0].step_begins()  # and raises
    step(boards[0])
    step(boards[1])
    step(boards[1])
    boards[0].stop(RUN)
    assert not boards[0].behind()


def test_without_a_folder_in_common_a_rank_sees_only_itself() -> None:
    alone = StepBoard(None, 1, 2)
    alone.begin(RUN)
    step(alone)
    alone.stop(RUN)
    assert not alone.behind()
    with pytest.raises(KeyboardInterrupt):
        alone.step_begins()
