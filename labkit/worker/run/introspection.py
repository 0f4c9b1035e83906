"""The activity of this rank, as the control thread reads it: Python frames, CPU time, torch's flight recorder."""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

from labkit import errors
from labkit.base.progress import running
from labkit.base.tracebacks import is_library
from labkit.wire.messages import RankReport, RecordedCollective, TaskReport
from labkit.worker.groups import backends, loopback_peers, new_groups, through_host
from labkit.worker.groups.process_group import DEFAULT_GROUP, ProcessGroups
from labkit.worker.steps.run_state import RunState

LAST_COLLECTIVES = 20
_PACKAGE = os.path.dirname(errors.__file__)
# Frames of these are between torch's: when a group is made, and in a collective through host memory.
_BETWEEN = (new_groups.__file__, loopback_peers.__file__, through_host.__file__)
_FOR_CELLS = tuple(os.path.join(_PACKAGE, folder, "") for folder in ("spmd", "checkpoint", "course"))


def report(state: RunState, groups: ProcessGroups | None = None) -> RankReport:
    """Report what the main thread does.

    Args:
        state: The run it works on.
        groups: This rank's process groups. The reader's collectives on them are counted from 1.

    Returns:
        The report. It contains less if something cannot be read, because the main thread goes on in the meantime. Never raises, and
        never blocks on the main thread.
    """
    run_id, started = state.run_id, state.started
    try:
        return _full_report(run_id, started, groups)
    except Exception:
        return RankReport(run_id, busy_s=0.0 if run_id is None else time.monotonic() - started)


def _full_report(run_id: int | None, started: float, process_groups: ProcessGroups | None) -> RankReport:
    collectives = recent_collectives(process_groups)  # first, so that a collective that begins later is counted as begun
    groups, begun = _groups()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime - time.thread_time()  # without the time of this thread itself
    idle = RankReport(
        None,
        cpu_s=cpu_s,
        collectives=collectives,
        groups=groups,
        begun=begun,
        group_count=backends.group_count(),
        threads=threading.active_count(),
        others_at_work=_others_at_work(),
    )
    if run_id is None:
        return idle
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    user = _user_frame(innermost)
    waits_in, partner = _waits_in(innermost)
    return replace(
        idle,
        run_id=run_id,
        busy_s=time.monotonic() - started,
        where=_place(user.f_code.co_filename, _line(user)) if user else "",
        function=user.f_code.co_name if user else "",
        code=linecache.getline(user.f_code.co_filename, _line(user)).strip() if user else "",
        innermost=f"{innermost.f_code.co_filename}:{_line(innermost)} {innermost.f_code.co_name}" if innermost else "",
        in_collective=bool(waits_in),
        waits_in=waits_in,
        partner=partner,
        task=TaskReport(task.title, task.done_bytes, task.total_bytes) if (task := running()) is not None else None,
    )


def _others_at_work() -> bool:
    """Return whether another Python thread runs code of the reader's or of torch.distributed, as an asynchronous save does."""
    main = threading.main_thread().ident
    return any(_is_at_work(frame) for ident, frame in list(sys._current_frames().items()) if ident != main)


def _is_at_work(frame: FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name) or name.startswith(_FOR_CELLS) or "/torch/distributed/" in name.replace(os.sep, "/"):
            return True
        frame = frame.f_back
    return False


def _user_frame(innermost: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is the reader's own; if there is none, the innermost of labkit's functions for cells."""
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
    # f_lineno is None at an instruction between two lines that the compiler has added.
    return frame.f_lineno or frame.f_code.co_firstlineno


def _waits_in(frame: FrameType | None) -> tuple[str, int | None]:
    """Return the function of torch.distributed that the main thread waits in, or ``synchronize`` for the device behind it.

    The second value is the rank that the call names as its source or destination, if it names one.
    """
    if frame is None:
        return "", None
    name, function = frame.f_code.co_filename.replace(os.sep, "/"), frame.f_code.co_name
    if function in ("synchronize", "wait", "wait_stream") and "/torch/" in name:
        return function, None
    if "/torch/distributed/" not in name and "/torch/_ops.py" not in name and frame.f_code.co_filename not in _BETWEEN:
        return "", None
    while frame is not None and (
        "/torch/" in frame.f_code.co_filename.replace(os.sep, "/") or frame.f_code.co_filename in _BETWEEN
    ):
        # Return the function that readers know: new_group, and not the helper in which it waits.
        if frame.f_code.co_filename.endswith("distributed_c10d.py") and not frame.f_code.co_name.startswith("_"):
            return frame.f_code.co_name, _partner(frame)
        frame = frame.f_back
    return "wait", None


def _partner(frame: FrameType) -> int | None:
    """Return the global rank that a call in torch.distributed names in its arguments."""
    named = frame.f_locals
    for role in ("src", "dst"):
        if isinstance(rank := named.get(role), int):
            return rank
        if isinstance(place := named.get(f"group_{role}"), int):
            group = named.get("group")
            return place if group is None else backends.group_ranks(group)[place]
    return None


def _groups() -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Return the ranks of each group and the number of operations begun on it; empty if the groups change in the meantime."""
    try:
        found = {backends.group_name(group): group for group in backends.groups()}
        ranks = {name: backends.group_ranks(group) for name, group in found.items()}
        return ranks, {name: sum(backends.sequence(group)) for name, group in found.items()}
    except Exception:
        return {}, {}


def recent_collectives(groups: ProcessGroups | None = None) -> tuple[RecordedCollective, ...]:
    """Return the last collectives of this rank, those of gloo first, then NCCL's; empty if torch keeps no record.

    Only collectives on the groups' present backends are included. New backends count from 1 again, so a call on an old backend, or
    on an earlier group of the same name, would be taken for a call of this run.
    """
    own = groups.own_collectives if groups is not None else 0
    since_ns = groups.present_since() if groups is not None else None
    bindings = sys.modules.get("torch._C._distributed_c10d")
    found: list[RecordedCollective] = []
    # torch keeps one record for NCCL and one for the other backends; a CPU build has no record for NCCL.
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(bindings, name, None)
        if dump is None:
            continue
        with contextlib.suppress(Exception):  # a diagnosis with less in it is better than none
            record = pickle.loads(dump(True, True, False))
            entries = [entry for entry in record.get("entries", []) if _is_present(entry, since_ns)]
            # A GPU's queue may be longer than LAST_COLLECTIVES, and all others wait for its first open one.
            first_open = next((place for place, entry in enumerate(entries) if not _is_done(entry)), len(entries))
            last_of_group = {_group_of(entry): place for place, entry in enumerate(entries)}
            early = {first_open, *last_of_group.values()}
            shown = [entry for place, entry in enumerate(entries) if place in early or place >= len(entries) - LAST_COLLECTIVES]
            found += [_collective(entry, own) for entry in shown]
    return tuple(found)


def _is_present(entry: dict[str, Any], since_ns: Mapping[str, int] | None) -> bool:
    """Return whether a recorded collective was called on a group that exists now."""
    if since_ns is None:
        return True
    born = since_ns.get(_group_of(entry))
    return born is not None and entry.get("time_created_ns", born) >= born


def _group_of(entry: dict[str, Any]) -> str:
    return str(entry.get("process_group", ("?", "?"))[0])


def _collective(entry: dict[str, Any], own: int) -> RecordedCollective:
    backend, _, name = str(entry.get("profiling_name", "")).rpartition(":")
    group = _group_of(entry)
    done = _is_done(entry)
    where, code = ("", "") if done else _called_at(entry.get("frames", ()))
    return RecordedCollective(
        sequence=int(entry.get("collective_seq_id", 0)) - (own if group == DEFAULT_GROUP else 0),
        name=name,
        group=group,
        sizes=tuple(tuple(shape) for shape in entry.get("input_sizes", ())),
        dtypes=tuple(map(str, entry.get("input_dtypes", ()))),
        done=done,
        backend=backend,
        where=where,
        code=code,
    )


def _is_done(entry: dict[str, Any]) -> bool:
    # gloo never moves an entry beyond "scheduled"; only "retired" shows that it has ended.
    return bool(entry.get("retired", False)) or entry.get("state") == "completed"


def _called_at(frames: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """Return the innermost of the reader's own lines that called a collective. On a GPU the rank has left that line long ago."""
    for frame in frames:
        name, line = str(frame["filename"]), int(frame["line"])
        if not is_library(name):
            return _place(name, line), linecache.getline(name, line).strip()
    return "", ""
