"""Counts of this rank's collectives and their bytes, whichever torch function makes the call.

torch's own `torch.distributed.tensor.debug.CommDebugMode` counts calls per operator and module. Up to torch 2.13 it raises
IndexError when a module runs forward twice in one context, which gradient accumulation does. It does not count bytes, and its names
differ between backends. The mode here only watches the ``c10d`` operators as they pass through the dispatcher.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.spmd.trace.events import Collective

# Operators are matched by prefix, so longer prefixes must come first.
_KINDS = (
    ("_allgather_base", "all_gather"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("_reduce_scatter_base", "reduce_scatter"),
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("barrier", "barrier"),
    ("send", "send"),
    ("recv", "recv"),
)
_NAMESPACES = ("c10d", "_c10d_functional")


class CollectiveLog:
    """The collectives that a block of code called, in order."""

    def __init__(self) -> None:
        self.calls: list[Collective] = []

    @property
    def counts(self) -> dict[str, int]:
        """The number of collectives of each kind."""
        return dict(Counter(call.kind for call in self.calls))

    def size_bytes(self, kind: str | None = None) -> int:
        """Return the bytes of all collectives, or of those of one kind, as in `Collective.size_bytes`."""
        return sum(call.size_bytes for call in self.calls if kind in (None, call.kind))

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends if every collective runs as a ring."""
        return sum(call.sent_bytes for call in self.calls)

    def __repr__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "no collectives"


@contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """Record the collectives that this rank calls while the block runs, including those in backward passes.

    Returns:
        A context manager that yields the log. The log misses barriers on gloo and collectives in torch's own threads.

    Ranks: local. It adds no collective.
    """
    log = CollectiveLog()
    with CollectiveMode(log.calls.append):
        yield log


class CollectiveMode(TorchDispatchMode):
    """A dispatch mode that reports each collective to a function once its call has returned.

    Args:
        record: Receives each `Collective`, with its time in seconds since the mode was created.
        clock: Returns monotonic seconds.
    """

    def __init__(self, record: Callable[[Collective], object], clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record, self._clock, self._start = record, clock, clock()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the operator, and record it if it is a collective."""
        kind = collective_kind(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        began_s = self._clock() - self._start
        result = func(*args, **(kwargs or {}))
        arguments = (*args, *(kwargs or {}).values())
        size_bytes = max((_num_bytes(part) for part in (*arguments, result)), default=0)
        duration_s = self._clock() - self._start - began_s
        group = _group(arguments)
        self._record(Collective(kind, size_bytes, group.size(), began_s, duration_s, group.group_name))
        return result


def collective_kind(func: Any) -> str | None:
    """Return the kind of collective that a dispatched operator is; None if it is not one."""
    if getattr(func, "namespace", None) not in _NAMESPACES:
        return None
    name = func.overloadpacket.__name__
    return next((kind for start, kind in _KINDS if name.startswith(start)), None)


def _num_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(_num_bytes, value))
    return 0


def _group(arguments: tuple[Any, ...]) -> dist.ProcessGroup:
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):
                continue  # reduce operations are ScriptObjects too
        if isinstance(value, dist.ProcessGroup):
            return value
    # A functional collective names its group by the last string among its arguments.
    names = [value for value in arguments if isinstance(value, str)]
    of_name: Any = dist.distributed_c10d
    return of_name._resolve_process_group(names[-1]) if names else of_name._get_default_group()  # type: ignore[no-any-return]
