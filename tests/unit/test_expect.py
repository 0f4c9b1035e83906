"""expect_error passes on the announced error only, and shows it whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labkit.errors import PoolStateError, RankFailedError, RankFailure, RunInterrupted, RunTimeoutError
from labkit.notebook.expect import ExpectationError, LessonText, error_class, expect_error


def failed(message: str = "shapes differ\nsecond line with the cause") -> RankFailedError:
    traceback = f'Cell "cell 3", line 2\n    batch @ weight\nRuntimeError: {message}'
    failures = [
        RankFailure(2, "exception", "RuntimeError", message, traceback),
        RankFailure(0, "interrupted", "KeyboardInterrupt", ""),
    ]
    return RankFailedError(failures, finished=(1, 3))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[LessonText]:
    lessons: list[LessonText] = []
    monkeypatch.setattr("labkit.notebook.expect._show", lessons.append)
    return lessons


def test_expected_error_is_swallowed_and_kept(shown: list[LessonText]) -> None:
    error = failed()
    with expect_error(RankFailedError) as caught:
        raise error
    assert caught.error is error
    assert len(shown) == 1


def test_lesson_text_holds_the_remote_traceback_and_who_finished(shown: list[LessonText]) -> None:
    with expect_error(RankFailedError):
        raise failed()
    for text in (repr(shown[0]), shown[0]._repr_html_()):
        assert "batch @ weight" in text
        assert "second line with the cause" in text
        assert "ranks 1, 3 finished" in text
        assert "RankFailedError" in text


def test_nothing_raised_fails_the_block(shown: list[LessonText]) -> None:
    with (
        pytest.raises(AssertionError, match="expected RankFailedError or RunTimeoutError, but nothing was raised"),
        expect_error(RankFailedError, RunTimeoutError),
    ):
        pass
    assert shown == []


def test_the_failed_block_is_shown_by_its_message_without_labkits_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(compile=SimpleNamespace(_filename_map={})))
    with pytest.raises(ExpectationError) as caught, expect_error(RankFailedError):
        {}["key"]
    (text,) = caught.value._render_traceback_()
    assert "but got another error:\nKeyError: 'key'" in text
    assert "notebook/expect.py" not in text


def test_another_class_fails_the_block_and_its_text_is_not_lost(shown: list[LessonText]) -> None:
    with (
        pytest.raises(AssertionError, match="expected RunTimeoutError, but got another error") as caught,
        expect_error(RunTimeoutError),
    ):
        raise failed()
    assert "batch @ weight" in str(caught.value)
    assert isinstance(caught.value.__cause__, RankFailedError)
    assert shown == []


def test_another_message_fails_the_block(shown: list[LessonText]) -> None:
    with (
        pytest.raises(AssertionError, match="matches 'out of memory', but its message is"),
        expect_error(RankFailedError, match="out of memory"),
    ):
        raise failed()
    assert shown == []


@pytest.mark.parametrize("match", ["shapes differ", "second line with", r"^RuntimeError: shapes", "had to be interrupted"])
def test_match_is_searched_in_the_message_and_in_each_ranks_message(shown: list[LessonText], match: str) -> None:
    with expect_error(RankFailedError, match=match):
        raise failed()
    assert len(shown) == 1


def test_source_lines_of_a_traceback_do_not_satisfy_match(shown: list[LessonText]) -> None:
    with pytest.raises(AssertionError), expect_error(RankFailedError, match="batch @ weight"):
        raise failed()


def test_an_error_without_ranks_is_shown_with_type_and_message(shown: list[LessonText]) -> None:
    with expect_error(PoolStateError):
        raise PoolStateError("the pool is closed")
    assert shown[0].text == "PoolStateError: the pool is closed"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_stopping_the_program_passes_through(shown: list[LessonText], stop: type[BaseException]) -> None:
    with pytest.raises(stop), expect_error(RankFailedError):
        raise stop
    assert shown == []


def test_an_interrupt_that_is_expected_is_swallowed(shown: list[LessonText]) -> None:
    with expect_error(RunInterrupted):
        raise RunInterrupted([RankFailure(0, "interrupted", "KeyboardInterrupt", "")])
    assert len(shown) == 1


def test_a_block_can_raise_in_a_second_use(shown: list[LessonText]) -> None:
    for _ in range(2):
        with expect_error(ValueError):
            int("x")
    assert len(shown) == 2


def test_html_escapes_and_colour_codes_are_gone(shown: list[LessonText]) -> None:
    with expect_error(ValueError):
        raise ValueError("\x1b[31mlist[<int>]\x1b[0m & more")
    assert "list[&lt;int&gt;] &amp; more" in shown[0]._repr_html_()
    assert "\x1b" not in repr(shown[0])


def test_text_is_shown_without_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    with expect_error(ValueError):
        raise ValueError("no notebook here")
    assert "ValueError: no notebook here" in capsys.readouterr().out


@pytest.mark.parametrize("types", [(), ("ValueError",), (ValueError("x"),), (int,)])
def test_no_exception_class_is_refused_before_the_block_runs(types: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        expect_error(*types)  # type: ignore[arg-type]


def test_error_class_finds_labkits_errors_by_name() -> None:
    assert error_class("RankFailedError") is RankFailedError
    assert error_class("RunInterrupted") is RunInterrupted
    assert error_class("PoolStateError") is PoolStateError


@pytest.mark.parametrize("name", ["ValueError", "RankFailure", "Sequence", "rank", "indent", ""])
def test_error_class_refuses_other_names_and_lists_what_a_run_raises(name: str) -> None:
    with pytest.raises(ValueError, match="RankFailedError, RunInterrupted, RunTimeoutError, WorkerDiedError"):
        error_class(name)
