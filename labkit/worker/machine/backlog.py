"""Messages of ranks that the notebook has not taken yet, kept within bounds while there is no notebook."""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

from labkit.wire.messages import Output, Stream
from labkit.wire.node_messages import FromNode, FromRank

# Beyond this, ranks wait in print. If no notebook is connected, their oldest output is thrown away instead.
LIMIT_BYTES = 4 << 20


class Backlog:
    """Messages in order.

    Attributes:
        size_bytes: The size of all messages kept.
    """

    def __init__(self) -> None:
        self._messages: deque[tuple[list[Any], int, Output | None]] = deque()
        self._dropped: dict[int, int] = {}
        self.size_bytes = 0

    @property
    def full(self) -> bool:
        """True if ranks should not be read before the notebook has taken something."""
        return self.size_bytes >= LIMIT_BYTES

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self._messages)

    def add(self, tag: FromNode, *parts: Any, output: Output | None = None) -> None:
        """Keep a message.

        Args:
            tag: The message's tag.
            *parts: Its further parts.
            output: The message itself if it is output, which can be thrown away.
        """
        size = sum(memoryview(part).nbytes for part in parts)
        self._messages.append(([pickle.dumps(tag, protocol=5), *parts], size, output))
        self.size_bytes += size

    def forget_oldest_output(self) -> None:
        """Throw away the oldest output until the rest is within bounds. Results and failures stay."""
        kept: deque[tuple[list[Any], int, Output | None]] = deque()
        while self.full and self._messages:
            parts, size, output = self._messages.popleft()
            if output is None:
                kept.append((parts, size, output))
            else:
                self.size_bytes -= size
                self._dropped[output.rank] = self._dropped.get(output.rank, 0) + size
        self._messages.extendleft(reversed(kept))

    def first(self) -> list[Any] | None:
        """Return the parts of the oldest message. If output was thrown away, return a note about it first."""
        while self._dropped:
            rank, size = self._dropped.popitem()
            text = f"... {size:,} bytes of output from before this line are lost: no notebook listened\n"
            message = Output(rank, 0, (Stream("stderr", text),))
            self._messages.appendleft(([pickle.dumps(FromRank(), protocol=5), pickle.dumps(message, protocol=5)], 0, None))
        return self._messages[0][0] if self._messages else None

    def taken(self) -> None:
        """Remove the oldest message, which has been sent."""
        self.size_bytes -= self._messages.popleft()[1]

    def clear(self) -> None:
        """Forget everything."""
        self._messages.clear()
        self._dropped.clear()
        self.size_bytes = 0
