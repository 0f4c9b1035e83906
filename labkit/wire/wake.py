"""A way to end another thread's wait in a poller."""

from __future__ import annotations

import contextlib
import os
import threading


class Wake:
    """A pipe that a poller waits for beside its sockets.

    Attributes:
        fd: The descriptor to register with the poller.
    """

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._closed = False
        # Reentrant, because a signal handler may call ring() in the middle of ring().
        self._lock = threading.RLock()

    def ring(self) -> None:
        """End the wait. Safe from any thread and signal handler, also after :meth:`close`."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write, b"x")

    def hear(self) -> None:
        """Empty the pipe after a wait has ended, so that the next wait can begin."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def close(self) -> bool:
        """Close the pipe. Return False if it was already closed."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
        os.close(self.fd)
        os.close(self._write)
        return True
