"""Small collectives on objects. If one rank fails, all ranks raise its error, so that none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from labkit.checkpoint.errors import CheckpointError, CheckpointWriteError

T = TypeVar("T")


class Comm:
    """The ranks that save or load together; a single rank if no process group exists.

    Args:
        group: A process group; None for the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.active = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if self.active else 0
        self.size = dist.get_world_size(group) if self.active else 1

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, on every rank.

        Ranks: collective. Blocks until all ranks call it, at most the group's time-out.
        """
        if self.size == 1:
            return [value]
        result: list[T | None] = [None] * self.size
        dist.all_gather_object(result, value, group=self.group)
        return result  # type: ignore[return-value]

    def everywhere(self, function: Callable[[], T], path: object) -> list[T]:
        """Call a function on every rank and return all results; if any rank fails, raise the first one's error on every rank.

        Raises:
            CheckpointError: The function raised a CheckpointError on some rank; its type is kept.
            CheckpointWriteError: The function raised something else; the message names the rank and the exception.

        Ranks: collective.
        """
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = function(), None
        except Exception as error:
            outcome = None, _portable(error, self.rank, path)
        outcomes = self.gather(outcome)
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                if self.size > 1:
                    failure.add_note(f"Rank {rank} raised this, so all ranks do.")
                raise failure
        return [value for value, _ in outcomes]  # type: ignore[misc]

    def on_first(self, function: Callable[[], T], path: object) -> T:
        """Call a function on rank 0 only, and return its result or raise its error on every rank.

        Ranks: collective; the function runs on rank 0.
        """
        return self.everywhere(lambda: function() if self.rank == 0 else None, path)[0]  # type: ignore[return-value]


def _portable(error: Exception, rank: int, path: object) -> Exception:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointWriteError(path, f"rank {rank} failed with {type(error).__name__}: {error}")
