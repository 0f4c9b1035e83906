"""A process that reads a part of a large ``.metadata``. Its input closes when the process that started it ends."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any


def main(arguments: Sequence[str]) -> None:
    """Carry out the steps that arrive on stdin, until it closes.

    Args:
        arguments: The descriptors of the file, of the tables and of both ends of the turn's pipe; the most bytes outside records;
            the size of a block; and the index of this process.
    """
    try:
        steps: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        threading.Thread(target=_listen, args=(steps,), daemon=True).start()
        _work(steps, *map(int, arguments))
    finally:
        # The thread waits for input, and a normal exit would wait for the thread.
        os._exit(1)


def _listen(steps: SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    """Queue the steps that arrive. When the input ends, end the process, even in the middle of a step."""
    try:
        while True:
            steps.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


def _work(
    steps: SimpleQueue[tuple[str, tuple[Any, ...]]], file: int, tables: int, take: int, give: int, most: int, size: int, index: int
) -> None:
    # Import only now, so that the thread already listens while numpy is imported.
    from labkit.checkpoint.formats.large_index.block_source import FIRST_TURN, Blocks
    from labkit.checkpoint.formats.large_index.parts import OTHER_FORM
    from labkit.checkpoint.formats.large_index.share import Share

    if index == 0:
        os.write(give, FIRST_TURN)
    share = Share(Blocks(file, (take, give), most, size), tables)
    while True:
        step, arguments = steps.get()
        try:
            reply = (getattr(share, step)(*arguments),)
        except OTHER_FORM:
            reply = None
        pickle.dump(reply, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()
