"""The present work of the main thread, shared with the control thread."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType

from labkit.worker.steps import cut
from labkit.worker.steps.orphans import Orphans
from labkit.worker.steps.step_board import StepBoard

# An optimizer's step is allowed to finish, because half a step cannot be undone. The controller repeats its signal every 0.25 s, so
# an interrupt is delivered within HOLD_S plus one repetition, and the cell still ends within 2 s.
HOLD_S = 1.5


def interrupt_borrowed_threads(main: int) -> set[int]:
    """Raise KeyboardInterrupt in the threads of native code that are running Python now.

    On a GPU, autograd runs backward and its hooks in a separate thread. Meanwhile the main thread waits in native code and handles
    no signal until that thread is done.

    Args:
        main: The main thread, which gets a signal instead.

    Returns:
        The threads.
    """
    own = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    borrowed = set(sys._current_frames()) - own - {main}
    for ident in borrowed:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt))
    return borrowed


def take_back_interrupts(threads: Iterable[int]) -> None:
    """Take back the KeyboardInterrupt of threads that have left Python without raising it; they would raise it in the next run."""
    for ident in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)


class RunState:
    """The current run of this rank.

    Args:
        board: The board on which the ranks see each other's optimizer steps.

    Attributes:
        board: The same board.
        run_id: The run in progress, or None.
        started: When it began, on the monotonic clock.
        interrupt_requested: Whether the controller has asked to stop this run.
    """

    def __init__(self, board: StepBoard) -> None:
        self.board = board
        self.run_id: int | None = None
        self.started = 0.0
        self.interrupt_requested = False
        self._orphans = Orphans()
        self._in_user_code = False
        self._holds = 0
        self._held_since: float | None = None
        self._unwinding_since: float | None = None
        self._main = threading.main_thread().ident or 0
        self._interrupted_threads: set[int] = set()
        # Otherwise a signal for a run that ends at this moment would hit the next one.
        self._changing = threading.Lock()
        signal.signal(signal.SIGINT, self._on_sigint)

    def begin(self, run_id: int) -> None:
        """Begin a run on the main thread."""
        self.interrupt_requested = False
        self._holds, self._held_since, self._unwinding_since = 0, None, None
        cut.hurry_data_loaders(False)
        cut.collect_children()
        self._orphans.begin()
        self.board.begin(run_id)
        self.started = time.monotonic()
        with self._changing:
            self.run_id = run_id

    def end(self) -> None:
        """End the run of the main thread."""
        with self._changing:
            self.run_id = None
            interrupted, self._interrupted_threads = self._interrupted_threads, set()
        take_back_interrupts(interrupted)
        self.board.end()
        if self.interrupt_requested:
            self._orphans.end()

    def enter_user_code(self) -> None:
        """Let SIGINT raise KeyboardInterrupt from here on."""
        self._in_user_code = True
        if self.interrupt_requested:
            raise KeyboardInterrupt

    def leave_user_code(self) -> None:
        """Ignore SIGINT from here on, so that labkit's own code is not interrupted half way."""
        self._in_user_code = False

    def hold(self) -> None:
        """Defer SIGINT from here on, for HOLD_S at most: an update in place has begun."""
        self._holds += 1

    def release(self) -> None:
        """End the deferral of SIGINT: the update in place is done.

        Raises:
            KeyboardInterrupt: SIGINT arrived in the meantime.
        """
        self._holds = max(0, self._holds - 1)
        if self._holds == 0 and self._held_since is not None and not self.board.behind():
            self._held_since = None
            raise KeyboardInterrupt

    def interrupt(self, run_id: int) -> None:
        """Interrupt the main thread if it still works on that run. Called from the control thread."""
        with self._changing:
            if self.run_id != run_id:
                return
            self.interrupt_requested = True
            self.board.stop(run_id)
            cut.hurry_data_loaders(True)
            self._orphans.note()
            # Use a signal and not PyThreadState_SetAsyncExc: a signal also ends sleeps and system calls.
            signal.pthread_kill(self._main, signal.SIGINT)
            if self._in_user_code and not self._holds and not self.board.behind():
                self._interrupted_threads |= interrupt_borrowed_threads(self._main)

    def _is_unwinding(self) -> bool:
        """Return whether the reader's own clean-up after the first interrupt is running. It may run for HOLD_S at most."""
        if not isinstance(sys.exception(), KeyboardInterrupt):
            return False
        now = time.monotonic()
        self._unwinding_since = self._unwinding_since or now
        return now - self._unwinding_since < HOLD_S

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if not self._in_user_code or self._is_unwinding():
            return
        behind = self.board.behind()
        if self._holds or behind:
            now = time.monotonic()
            self._held_since = self._held_since or now
            if behind or now - self._held_since < HOLD_S:
                return
        raise KeyboardInterrupt
