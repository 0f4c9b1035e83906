"""Count collectives and their bytes on this rank, whichever call of torch made them.

torch's own `torch.distributed.tensor.debug.CommDebugMode` counts calls per operator and module. It raises IndexError when a
module runs forward twice in one context, which gradient accumulation does; it knows no bytes; and its names differ between
backends. This mode does one thing: it watches the ``c10d`` operators go through the dispatcher.
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

from labkit.spmd.events import Collective

# Longest first: a name is what its operator begins with.
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
    """The collectives of a block of code, in the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[Collective] = []

    @property
    def counts(self) -> dict[str, int]:
        """How many of each kind."""
        return dict(Counter(call.kind for call in self.calls))

    def size_bytes(self, kind: str | None = None) -> int:
        """Bytes of all, or of one kind, as in `Collective.size_bytes`."""
        return sum(call.size_bytes for call in self.calls if kind in (None, call.kind))

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends, in rings."""
        return sum(call.sent_bytes for call in self.calls)

    def __repr__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in self.counts.items()) or "no collectives"


@contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """Record the collectives that this rank calls while the block runs, its backward passes included.

    Returns:
        A context manager that gives the log. A barrier on gloo and what torch does in threads of its own are not seen.

    Ranks: local. It adds no collective.
    """
    log = CollectiveLog()
    with CollectiveMode(log.calls.append):
        yield log


class CollectiveMode(TorchDispatchMode):
    """Hands each collective to a function when its call has returned.

    Args:
        record: Takes the `Collective`; its time counts from the making of the mode.
        clock: Seconds, monotonic.
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
    """The kind of collective that a dispatched operator is, or None."""
    if getattr(func, "namespace", None) not in _NAMESPACES:
        return None
    name = func.overloadpacket.__name__
    return next((kind for start, kind in _KINDS if name.startswith(start)), None)


def _num_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
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
                continue  # a reduce operation is such an object too
        if isinstance(value, dist.ProcessGroup):
            return value
    # Functional collectives name their group; the name is the last text among the arguments.
    names = [value for value in arguments if isinstance(value, str)]
    of_name: Any = dist.distributed_c10d
    return of_name._resolve_process_group(names[-1]) if names else of_name._get_default_group()  # type: ignore[no-any-return]
