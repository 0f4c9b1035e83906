"""Protection against Ctrl-C for work that must not stay half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def caught_sigint(handler: Callable[[], None]) -> Iterator[None]:
    """Turn SIGINT into a call, so that it cannot interrupt the block. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda number, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def held_sigint() -> Iterator[Callable[[], None]]:
    """Defer SIGINT: raise it only when the yielded function is called, or at the end of the block.

    Raises:
        KeyboardInterrupt: SIGINT arrived in the meantime.
    """
    came = False

    def note() -> None:
        nonlocal came
        came = True

    def stop_if_asked() -> None:
        nonlocal came
        if came:
            came = False
            raise KeyboardInterrupt

    with caught_sigint(note):
        yield stop_if_asked
    stop_if_asked()
