"""Reports on ranks whose process has ended: how each ended, and what it wrote last."""

from __future__ import annotations

import signal
from collections import defaultdict, deque

from labkit.controller.start.launchers.launcher import WorkerExit
from labkit.wire.messages import Output, Stream, StreamName
from labkit.wire.pipes import Rest

LAST_LINES = 20
# The kind of a death that was not observed, because the connection to the rank's machine was lost.
LOST = "lost"
_PIECES = 64
_PIECE_CHARS = 4096
_GIB = 2**30


class LastWords:
    """The last output of each rank in the present run, and the position up to which its output has arrived."""

    def __init__(self) -> None:
        self._texts: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_PIECES))
        self._positions: dict[tuple[int, StreamName], int] = {}

    def begin_run(self) -> None:
        """Forget the output so far, because a new run begins."""
        self._texts.clear()

    def forget(self, rank: int) -> None:
        """Forget a rank, because a new process replaces it."""
        self._texts.pop(rank, None)
        for name in ("stdout", "stderr"):
            self._positions.pop((rank, name), None)

    def hear(self, message: Output) -> None:
        """Record output of a rank."""
        for item in message.items:
            if isinstance(item, Stream):
                self._texts[message.rank].append(item.text[-_PIECE_CHARS:])
                self._positions[message.rank, item.name] = item.position

    def of(self, rank: int) -> str:
        """Return the rank's last lines."""
        return "\n".join("".join(self._texts[rank]).splitlines()[-LAST_LINES:])

    def unsent(self, rank: int, event: WorkerExit) -> tuple[tuple[Stream, ...], int]:
        """Return the output that a dead rank had not sent, as far as it was saved, and the number of bytes that are lost."""
        found, lost = [], 0
        rests: tuple[tuple[StreamName, Rest], ...] = (("stdout", event.stdout), ("stderr", event.stderr))
        for name, rest in rests:
            missing, text = rest.after(self._positions.get((rank, name), 0))
            lost += missing
            if text:
                found.append(Stream(name, text, rest.position + len(rest.data)))
        return tuple(found), lost


def describe_exit(event: WorkerExit) -> tuple[str, str]:
    """Describe a process's end: (signal or exit code, its usual meaning). If its machine is lost, return (LOST, the cause)."""
    code = event.exitcode
    if event.cause:
        return LOST, event.cause
    if code >= 0:
        meaning = "it ended itself, for example by os._exit" if code else "it ended itself"
        return f"exit code {code}", meaning
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}", "a signal ended it"
    meanings = {
        "SIGKILL": "killed from outside",
        "SIGSEGV": "native code touched memory that is not its own",
        "SIGABRT": "native code gave up, often a failed check in C++; its last output says which",
        "SIGBUS": "bad memory access, often a full /dev/shm",
        "SIGTERM": "asked to end from outside",
        "SIGFPE": "an arithmetic error in native code",
        "SIGILL": "an instruction that this processor does not have",
    }
    meaning = meanings.get(name, "a signal ended it")
    if name == "SIGKILL" and (memory := event.memory) is not None:
        killer = "the system killed it because memory ran out" if memory.ran_out else meaning
        peak = f"its memory had reached {memory.peak_bytes / _GIB:.2f} GiB, and " if memory.peak_bytes else ""
        meaning = (
            f"{killer}; {peak}{memory.free_bytes / _GIB:.1f} of the machine's {memory.total_bytes / _GIB:.1f} GiB are free now"
        )
    return name, meaning
