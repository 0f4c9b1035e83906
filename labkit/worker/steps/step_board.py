"""The board on which the ranks of one machine see each other's optimizer steps, so that a stop falls between the same steps.

Ranks that train together are in step only up to the last collective of a backward. From there each goes on alone: one may be inside
its optimizer step when another has not begun it. An interrupt at that moment would leave parameters of different steps, which
cannot be repaired. So the first rank that gets the interrupt fixes how far the run may go: as many steps as any rank has begun. A
rank that has taken fewer goes on until it has caught up, and no rank begins another step.

The board is a small shared file in the pool's directory. A step costs two writes into memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator

# A rank that has not caught up by then is waiting for something else.
CATCH_UP_S = 0.8
_POLL_S = 0.002

_HEAD = struct.Struct("<qq")  # the run that is being stopped, and the number of steps it may take
_SLOT = struct.Struct("<qqq")  # per rank: its run, the steps it has begun, the steps it has ended


class StepBoard:
    """One rank's view of the board.

    Args:
        path: The file; it is made here if it does not exist yet. None if the ranks share no folder: then each has its own board and
            sees no other rank.
        rank: This rank.
        world_size: Number of ranks on the board.
    """

    def __init__(self, path: str | None, rank: int, world_size: int) -> None:
        self._rank = rank
        self._run_id = self._begun = self._ended = 0
        self._stopped_at: float | None = None
        if path is None:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
        else:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = _HEAD.size + world_size * _SLOT.size
        os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)
        self._thread_lock = threading.Lock()
        self._publish()

    def begin(self, run_id: int) -> None:
        """Record that this rank begins a run."""
        self._stopped_at = None
        self._run_id, self._begun, self._ended = run_id, 0, 0
        self._publish()

    def end(self) -> None:
        """Record that this rank has left its run, so that no rank waits for it."""
        self._run_id = 0
        self._publish()

    def step_begins(self) -> None:
        """Record that an optimizer step is about to begin.

        Raises:
            KeyboardInterrupt: The run is being stopped, and no rank has begun this step before the stop.
        """
        self._ended, self._begun = self._begun, self._begun + 1  # a step that raised is over as well
        # First publish, then look: the rank that stops the run also first publishes and then looks.
        self._publish()
        if self._stopping() and self._begun > self._last_step():
            self._begun -= 1
            self._publish()
            raise KeyboardInterrupt

    def step_ends(self) -> None:
        """Record that the step is over."""
        self._ended = self._begun
        self._publish()

    def stop(self, run_id: int) -> None:
        """Stop the run after the last step that any rank has begun. Called from any thread, on any rank."""
        if self._run_id != run_id or self._stopped_at is not None:
            return
        with self._locked():
            if _HEAD.unpack_from(self._memory)[0] != run_id:
                _HEAD.pack_into(self._memory, 0, run_id, -1)
                last = max((begun for run, begun, _ in self._slots() if run == run_id), default=0)
                _HEAD.pack_into(self._memory, 0, run_id, last)
        self._stopped_at = time.monotonic()

    def behind(self) -> bool:
        """Return whether this rank may still catch up with the others before it is stopped."""
        return self._may_catch_up() and self._ended < _HEAD.unpack_from(self._memory)[1]

    def wait_for_others(self) -> None:
        """Wait until every rank of a run that is being stopped has caught up, as long as that can still be expected."""
        while self._may_catch_up() and self._anybody_behind():
            time.sleep(_POLL_S)

    def _may_catch_up(self) -> bool:
        return self._stopped_at is not None and time.monotonic() < self._stopped_at + CATCH_UP_S

    def _anybody_behind(self) -> bool:
        stopped, last = _HEAD.unpack_from(self._memory)
        return any(run == stopped and ended < last for run, _, ended in self._slots())

    def _stopping(self) -> bool:
        return bool(self._run_id) and _HEAD.unpack_from(self._memory)[0] == self._run_id

    def _last_step(self) -> int:
        with self._locked():  # the number may be being determined
            return int(_HEAD.unpack_from(self._memory)[1])

    def _slots(self) -> Iterator[tuple[int, int, int]]:
        return _SLOT.iter_unpack(memoryview(self._memory)[_HEAD.size :])

    def _publish(self) -> None:
        _SLOT.pack_into(self._memory, _HEAD.size + self._rank * _SLOT.size, self._run_id, self._begun, self._ended)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The file's lock excludes other processes, but not another thread of this process.
        with self._thread_lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
