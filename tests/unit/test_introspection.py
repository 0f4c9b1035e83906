"""What a rank says of itself. A look never fails: it comes from the thread on which every way out of a hang depends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from labkit.worker import introspection


def state(run_id: int | None = 3) -> Any:
    return SimpleNamespace(run_id=run_id, started=0.0)


def test_frame_between_two_lines_is_placed_at_the_first_line_of_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None: ...

    # Python gives no line for the instructions that it has added itself, such as those around an exception.
    frame = SimpleNamespace(f_lineno=None, f_code=work.__code__, f_back=None)
    monkeypatch.setattr(introspection.sys, "_current_frames", lambda: dict.fromkeys(range(-1, 1), frame))
    monkeypatch.setattr(introspection.threading, "main_thread", lambda: SimpleNamespace(ident=0))
    report = introspection.report(state())
    assert report.where == f"test_introspection.py, line {work.__code__.co_firstlineno}"
    assert report.code == "def work() -> None: ..."


def test_look_that_fails_still_says_which_run_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(frame: Any) -> str:
        raise RuntimeError("the frame has changed meanwhile")

    monkeypatch.setattr(introspection, "_place", fails)
    report = introspection.report(state())
    assert report.run_id == 3
    assert report.busy_s > 0
    assert report.where == ""
