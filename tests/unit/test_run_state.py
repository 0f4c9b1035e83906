"""Interrupts of threads that belong to native code."""

from __future__ import annotations

import _thread
import sys
import threading
import time

import pytest

from labkit.worker.steps.run_state import interrupt_borrowed_threads, take_back_interrupts


class Borrowed:
    """A thread that Python's own list of threads does not know, as autograd's: it waits in native code, and then calls Python."""

    def __init__(self) -> None:
        self.raised: bool | None = None
        self.began, self.over, self.released = threading.Event(), threading.Event(), threading.Lock()
        self.released.acquire()
        self.ident = _thread.start_new_thread(self._run, ())
        assert self.began.wait(10)

    def _run(self) -> None:
        try:
            self.began.set()
            self.released.acquire()
            for _ in range(1000):
                time.sleep(0)
            self.raised = False
        except KeyboardInterrupt:
            self.raised = True
        self.over.set()

    def finish(self) -> bool | None:
        self.released.release()
        assert self.over.wait(10)
        return self.raised


@pytest.mark.parametrize("taken_back", [False, True])
def test_interrupt_reaches_a_borrowed_thread_unless_it_is_taken_back(taken_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed = Borrowed()
    # pytest-xdist has such threads too.
    frames = sys._current_frames()
    monkeypatch.setattr(sys, "_current_frames", lambda: {borrowed.ident: frames[borrowed.ident]})
    interrupted = interrupt_borrowed_threads(threading.get_ident())
    assert interrupted == {borrowed.ident}
    if taken_back:
        take_back_interrupts(interrupted)
    assert borrowed.finish() is not taken_back
