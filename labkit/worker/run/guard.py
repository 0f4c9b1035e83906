"""A warning in advance: a cell on some ranks is about to call a collective that needs all of them."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from labkit.base.plain_text import name_ranks
from labkit.base.tracebacks import is_library
from labkit.worker.groups import backends

# The operators' names that differ from the functions that readers call.
_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


class PartialRunWarning(UserWarning):
    """A cell that runs on some ranks calls a collective that other ranks would have to join."""


class _Guard(TorchDispatchMode):
    """A check of each collective before it is called. Collectives are operators, and their group is an argument.

    Args:
        ranks: The ranks that the cell runs on.
    """

    def __init__(self, ranks: frozenset[int]) -> None:
        super().__init__()
        self._ranks = ranks
        self._warned: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._look(func, args)
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: tuple[Any, ...]) -> None:
        for argument in args:
            group = _group(argument)
            if group is None:
                continue
            others = set(backends.group_ranks(group)) - self._ranks
            name = func._schema.name.split("::")[-1].strip("_")
            if others and name not in self._warned:
                self._warned.add(name)
                place, line = _user_place()
                them = "it" if len(others) == 1 else "them"
                warnings.warn_explicit(
                    f"this cell runs on {name_ranks(self._ranks)} only, and calls {_NAMES.get(name, name)} on a group "
                    f"with {name_ranks(others)} in it as well. It will wait for {them}: run the cell on all ranks, "
                    "or first make a group of these ranks: dist.new_group in a cell of all ranks.",
                    PartialRunWarning,
                    place,
                    line,
                )


def _group(argument: Any) -> Any:
    """Return the ProcessGroup that an operator's argument refers to, or None."""
    import torch
    import torch.distributed as dist

    if isinstance(argument, torch.ScriptObject):
        with contextlib.suppress(Exception):
            found = dist.ProcessGroup.unbox(argument)
            return next((group for group in backends.groups() if group == found), None)
    if isinstance(argument, str):
        return next((group for group in backends.groups() if backends.group_name(group) == argument), None)
    return None


def _user_place() -> tuple[str, int]:
    """Return the file and line of the innermost frame that is the reader's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno) if frame is not None else ("<cell>", 1)


@contextlib.contextmanager
def guarded(ranks: tuple[int, ...], world_size: int) -> Iterator[None]:
    """Warn about collectives of larger groups during a run on some ranks only. Costs nothing if the run is on all ranks."""
    if len(ranks) == world_size:
        yield
        return
    with _Guard(frozenset(ranks)):
        yield
