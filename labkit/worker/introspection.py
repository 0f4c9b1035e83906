"""What this rank does right now, read from the control thread: Python frames, CPU time, torch's flight recorder."""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from labkit.progress import running
from labkit.tracebacks import is_library
from labkit.wire.messages import Collective, RankReport, TaskReport
from labkit.worker.process_group import DEFAULT_GROUP, ProcessGroups
from labkit.worker.run_state import RunState

LAST_COLLECTIVES = 20
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FOR_CELLS = tuple(os.path.join(_PACKAGE, folder, "") for folder in ("spmd", "checkpoint", "course"))


def report(state: RunState, groups: ProcessGroups | None = None) -> RankReport:
    """Look at the main thread.

    Args:
        state: Which run it works on.
        groups: This rank's process groups. The reader's collectives on them are counted from 1.

    Returns:
        The report, with less in it where something cannot be read: the main thread goes on meanwhile. Never raises, and never
        blocks on the main thread.
    """
    run_id, started = state.run_id, state.started
    try:
        return _full_report(run_id, started, recent_collectives(groups))
    except Exception:
        return RankReport(run_id, busy_s=0.0 if run_id is None else time.monotonic() - started)


def _full_report(run_id: int | None, started: float, collectives: tuple[Collective, ...]) -> RankReport:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    if run_id is None:
        return RankReport(None, cpu_s=cpu_s, collectives=collectives, groups=_groups(), threads=threading.active_count())
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    user = _user_frame(innermost)
    waits_in = _waits_in(innermost)
    return RankReport(
        run_id,
        busy_s=time.monotonic() - started,
        where=_place(user.f_code.co_filename, _line(user)) if user else "",
        function=user.f_code.co_name if user else "",
        code=linecache.getline(user.f_code.co_filename, _line(user)).strip() if user else "",
        innermost=f"{innermost.f_code.co_filename}:{_line(innermost)} {innermost.f_code.co_name}" if innermost else "",
        in_collective=bool(waits_in),
        waits_in=waits_in,
        cpu_s=cpu_s,
        collectives=collectives,
        groups=_groups(),
        threads=threading.active_count(),
        task=TaskReport(task.title, task.done_bytes, task.total_bytes) if (task := running()) is not None else None,
    )


def _user_frame(innermost: FrameType | None) -> FrameType | None:
    """The innermost frame that is the reader's own; without one, the innermost of labkit's functions for cells."""
    frame = innermost
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None:
        return frame
    frame = innermost
    while frame is not None and not frame.f_code.co_filename.startswith(_FOR_CELLS):
        frame = frame.f_back
    return frame


def _place(name: str, line: int) -> str:
    from IPython.core.interactiveshell import InteractiveShell

    number = InteractiveShell.instance().compile._filename_map.get(name) if InteractiveShell.initialized() else None
    return f"{os.path.basename(name) if number is None else f'Cell In[{number}]'}, line {line}"


def _line(frame: FrameType) -> int:
    # None between two lines, at an instruction that the compiler has added.
    return frame.f_lineno or frame.f_code.co_firstlineno


def _waits_in(frame: FrameType | None) -> str:
    """The function of torch.distributed that the main thread waits in, or ``synchronize`` for the device behind it."""
    if frame is None:
        return ""
    name, function = frame.f_code.co_filename.replace(os.sep, "/"), frame.f_code.co_name
    if function in ("synchronize", "wait", "wait_stream") and "/torch/" in name:
        return function
    if "/torch/distributed/" not in name and "/torch/_ops.py" not in name:
        return ""
    while frame is not None and "/torch/" in frame.f_code.co_filename.replace(os.sep, "/"):
        # The function that readers know: new_group, and not the helper in which it waits.
        if frame.f_code.co_filename.endswith("distributed_c10d.py") and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name
        frame = frame.f_back
    return "wait"


def _groups() -> dict[str, tuple[int, ...]]:
    from labkit.worker import backends

    try:
        return {backends.group_name(group): backends.group_ranks(group) for group in backends.groups()}
    except Exception:
        return {}  # read while the main thread changes them


def recent_collectives(groups: ProcessGroups | None = None) -> tuple[Collective, ...]:
    """The last collectives of this rank, those of NCCL after those of gloo; empty where torch keeps no record.

    Only those on the groups' present backends: new ones count from 1 again, and what was called on the old ones would be
    taken for a call of this run.
    """
    own, since_ns = (groups.own_collectives, groups.formed_ns) if groups is not None else (0, 0)
    bindings = sys.modules.get("torch._C._distributed_c10d")
    found: list[Collective] = []
    # torch keeps one record for NCCL and one for the other backends; a CPU build has no first one.
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        with contextlib.suppress(Exception):  # a diagnosis with less in it is better than none
            record = pickle.loads(dump(True, True, False))
            entries = [entry for entry in record.get("entries", []) if entry.get("time_created_ns", since_ns) >= since_ns]
            # A GPU's queue may be longer than that, and its first one is what all others wait for.
            first_open = next((place for place, entry in enumerate(entries) if not _is_done(entry)), len(entries))
            shown = [*entries[:-LAST_COLLECTIVES][first_open : first_open + 1], *entries[-LAST_COLLECTIVES:]]
            found += [_collective(entry, own) for entry in shown]
    return tuple(found)


def _collective(entry: dict[str, Any], own: int) -> Collective:
    backend, _, name = str(entry.get("profiling_name", "")).rpartition(":")
    group = entry.get("process_group", ("?", "?"))
    done = _is_done(entry)
    where, code = ("", "") if done else _called_at(entry.get("frames", ()))
    return Collective(
        sequence=int(entry.get("collective_seq_id", 0)) - (own if group[0] == DEFAULT_GROUP else 0),
        name=name,
        group=str(group[0]),
        sizes=tuple(tuple(shape) for shape in entry.get("input_sizes", ())),
        dtypes=tuple(map(str, entry.get("input_dtypes", ()))),
        done=done,
        backend=backend,
        where=where,
        code=code,
    )


def _is_done(entry: dict[str, Any]) -> bool:
    # gloo never moves an entry beyond "scheduled"; only retired tells that it has ended.
    return bool(entry.get("retired", False)) or entry.get("state") == "completed"


def _called_at(frames: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """The innermost of the reader's own lines among those that led to a collective. On a GPU the rank has left it long since."""
    for frame in frames:
        name, line = str(frame["filename"]), int(frame["line"])
        if not is_library(name):
            return _place(name, line), linecache.getline(name, line).strip()
    return "", ""
