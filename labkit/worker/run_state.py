"""What the main thread works on now, shared with the control thread."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType


class RunState:
    """The current run of this rank.

    Attributes:
        run_id: The run in progress, or None.
        started: When it began, on the monotonic clock.
        interrupt_requested: The controller asked to stop this run.
    """

    def __init__(self) -> None:
        self.run_id: int | None = None
        self.started = 0.0
        self.interrupt_requested = False
        self._in_user_code = False
        self._main = threading.main_thread().ident or 0
        signal.signal(signal.SIGINT, self._on_sigint)

    def begin(self, run_id: int) -> None:
        """The main thread takes up a run."""
        self.interrupt_requested = False
        self.started = time.monotonic()
        self.run_id = run_id

    def end(self) -> None:
        """The main thread is done with its run."""
        self.run_id = None

    def enter_user_code(self) -> None:
        """From here on SIGINT raises KeyboardInterrupt."""
        self._in_user_code = True
        if self.interrupt_requested:
            raise KeyboardInterrupt

    def leave_user_code(self) -> None:
        """From here on SIGINT does nothing: labkit's own code is not interrupted half way."""
        self._in_user_code = False

    def interrupt(self, run_id: int) -> None:
        """Interrupt the main thread if it still works on that run. Called from the control thread."""
        if self.run_id != run_id:
            return
        self.interrupt_requested = True
        # A signal and not PyThreadState_SetAsyncExc: it also ends sleeps and system calls.
        signal.pthread_kill(self._main, signal.SIGINT)

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if self._in_user_code:
            raise KeyboardInterrupt
