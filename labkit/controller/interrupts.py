"""Keeps Ctrl-C from breaking off what must not stay half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def caught_sigint(handler: Callable[[], None]) -> Iterator[None]:
    """Turn SIGINT into a call, so that it cannot break off what is under way. Does nothing outside the main thread."""
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
    """Let SIGINT wait for a place where the block can stop: each call of what this gives, and the block's end.

    Raises:
        KeyboardInterrupt: SIGINT has come, at one of these places.
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
