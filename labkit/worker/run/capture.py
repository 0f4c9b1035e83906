"""Capture of everything a rank writes to its file descriptors 1 and 2, in order and without loss.

Python's print, C's printf and child processes all write to two pipes. One thread reads the pipes and sends what it finds. The
process that started this worker has the read ends open too, so the last output before a crash is still there for the report of the
worker's death.

Two pipes do not keep the order between stdout and stderr. So before a Python stream writes after the other stream, it lets the
reader empty the other's pipe.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import io
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

from labkit.wire.messages import Display, Output, Stream, StreamName
from labkit.wire.pipes import Kept
from labkit.wire.transport import WorkerWire

PIECE_BYTES = 64 * 1024
# How long text may wait for more text before it is sent: long enough to gather a loop's prints, short enough to look live.
GATHER_S = 0.02
# In a flood the pipe (64 KiB) would be full before that time is over, and the writer would have to wait.
FLOOD_BYTES = PIECE_BYTES // 8
FLOOD_GATHER_S = 0.002
# How long a thread waits for another one to finish its line.
LINE_S = 0.2
NAMES: tuple[StreamName, StreamName] = ("stdout", "stderr")


class Capture:
    """Reads this process's stdout and stderr and sends them as Output.

    Args:
        wire: The wire that takes the output.
        rank: This rank.
        read_fds: Read ends of the pipes that fd 1 and fd 2 write to.
        kept: Memory for the last output read, for the report of a death.

    Attributes:
        run_id: The run that the output belongs to.
        detached: Whether this process is a forked child, whose streams only write.
    """

    def __init__(self, wire: WorkerWire, rank: int, read_fds: tuple[int, int], kept: Kept) -> None:
        self._wire, self._rank = wire, rank
        self._read_fds, self._kept = read_fds, kept
        self._positions = [0 for _ in read_fds]
        for fd in read_fds:
            os.set_blocking(fd, False)
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in read_fds]
        self._lock = threading.RLock()
        self._last: _Stream | None = None
        self._stop_read, self._stop_write = os.pipe()
        self.run_id = 0
        self._c_stdout = _CStdout()
        self._streams = [_Stream(fd, self) for fd in (1, 2)]
        sys.stdout, sys.stderr = self._streams
        sys.__stdout__, sys.__stderr__ = self._streams  # type: ignore[misc]
        # A forked child (a DataLoader worker) has no reading thread: its streams write to the inherited pipes only.
        os.register_at_fork(after_in_child=self._detach)
        self.detached = False
        self._thread = threading.Thread(target=self._read_loop, name="labkit-output", daemon=True)
        self._thread.start()

    def emit(self, item: Display) -> None:
        """Send a display, after the text before it."""
        if self.detached:
            return
        self.flush()
        self._wire.send_event(Output(self._rank, self.run_id, (item,)))

    def flush(self) -> None:
        """Send everything written so far. Returns when the wire has taken it."""
        if self.detached:
            return
        self.flush_streams()
        with self._lock:
            while self._read_once():
                pass

    def flush_streams(self) -> None:
        """Write out what the streams of Python and C still buffer."""
        for stream in self._streams:
            with contextlib.suppress(OSError):  # the reader has closed fd 1 or 2
                stream.flush()
        self._c_stdout.flush()

    def switch(self, stream: _Stream) -> None:
        """Send the other stream's text first. A stream calls this when it is about to write after the other one."""
        if self._last is not None and not self.detached:
            io.TextIOWrapper.flush(self._last)
            with self._lock:
                while self._read_once():
                    pass
        self._last = stream

    def is_last(self, stream: _Stream) -> bool:
        """Return whether this stream wrote last."""
        return self._last is stream

    def close(self) -> None:
        """Send the rest of the output and stop reading."""
        self.flush()
        os.write(self._stop_write, b"x")
        self._thread.join(1.0)

    def _detach(self) -> None:
        self.detached = True

    def _read_loop(self) -> None:
        poller = select.poll()
        for fd in (*self._read_fds, self._stop_read):
            poller.register(fd, select.POLLIN)
        pause = threading.Event()
        before = self._positions.copy()
        gather_s = GATHER_S
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._stop_read in ready:
                return
            pause.wait(gather_s)
            with self._lock:
                self._read_once()
                gather_s = FLOOD_GATHER_S if sum(self._positions) - sum(before) >= FLOOD_BYTES else GATHER_S
                before = self._positions.copy()

    def _read_once(self) -> bool:
        """Read at most one piece of each pipe and send it. The caller holds the lock."""
        items: list[Stream | Display] = []
        for stream, (name, fd, decoder) in enumerate(zip(NAMES, self._read_fds, self._decoders, strict=True)):
            try:
                data = os.read(fd, PIECE_BYTES)
            except BlockingIOError:
                continue
            self._kept.keep(stream, data)
            self._positions[stream] += len(data)
            text = decoder.decode(data)
            if text:
                undecoded, _ = decoder.getstate()  # the first bytes of a character
                items.append(Stream(name, text, self._positions[stream] - len(undecoded)))
        if items:
            self._wire.send_event(Output(self._rank, self.run_id, tuple(items)))
        return bool(items)


class _CStdout:
    """C's own stdout. On a pipe C would buffer text until 4 KiB are full or the process ends."""

    _LINE_BUFFERED = 1

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._file = ctypes.c_void_p.in_dll(self._libc, "__stdoutp" if sys.platform == "darwin" else "stdout")
        self._libc.setvbuf(self._file, None, self._LINE_BUFFERED, ctypes.c_size_t(io.DEFAULT_BUFFER_SIZE))

    def flush(self) -> None:
        """Write out an unfinished line."""
        self._libc.fflush(self._file)


class _Stream(io.TextIOWrapper):
    """sys.stdout or sys.stderr of a rank: text on a file descriptor.

    Nothing stays in a buffer here: a dot that a loop prints is shown at once, and text written before a crash is in the pipe. But
    print writes a line in pieces. So a thread that has begun a line makes others wait for up to LINE_S. And a forked child (a
    DataLoader worker), whose siblings share the pipe, writes whole lines only.
    """

    def __init__(self, fd: int, capture: Capture) -> None:
        self._capture = capture
        self._line = threading.Lock()
        self._line_of: int | None = None
        buffer = io.BufferedWriter(io.FileIO(fd, "wb", closefd=False))
        super().__init__(buffer, encoding="utf-8", errors="backslashreplace")

    def write(self, text: str) -> int:
        if not self._capture.is_last(self):
            self._capture.switch(self)
        if self._capture.detached:
            count = super().write(text)
            if "\n" in text:
                super().flush()
            return count
        self._take_line()
        count = super().write(text)
        super().flush()
        if text.endswith("\n"):
            self._leave_line()
        return count

    def flush(self) -> None:
        """Write out buffered bytes. A flush in the middle of a line ends the thread's hold on the line."""
        super().flush()
        self._leave_line()

    def _take_line(self) -> None:
        me = threading.get_ident()
        if self._line_of != me:
            self._line.acquire(timeout=LINE_S)  # in vain if the other thread stops in mid-line: its line is cut
            self._line_of = me

    def _leave_line(self) -> None:
        if self._line_of == threading.get_ident():
            self._line_of = None
            self._line.release()

    def isatty(self) -> bool:
        return False

    def close(self) -> None:
        """Stay open, because later cells still print."""
        self.flush()


Emit = Callable[[Display], Any]
