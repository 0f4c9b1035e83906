"""A rank's report on itself. A look never fails, because every way out of a hang depends on its thread."""

from __future__ import annotations

import linecache
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from labkit.worker.run import introspection


def state(run_id: int | None = 3) -> Any:
    return SimpleNamespace(run_id=run_id, started=0.0)


def test_frame_between_two_lines_is_placed_at_the_first_line_of_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None: ...

    # Python gives no line for the instructions that it has added itself, such as those around an exception.
    frame = SimpleNamespace(f_lineno=None, f_code=work.__code__, f_back=None)
    monkeypatch.setattr(introspection.sys, "_current_frames", lambda: dict.fromkeys(range(-1, 1), frame))
    monkeypatch.setattr(introspection.threading, "main_thread", lambda: SimpleNamespace(ident=0))
    report = introspection.report(state())
    assert report.where == f"test_introspection.py, line {work.__code__.co_firstlineno}"
    assert report.code == "def work() -> None: ..."


def test_look_that_fails_still_says_which_run_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(frame: Any) -> str:
        raise RuntimeError("the frame has changed meanwhile")

    monkeypatch.setattr(introspection, "_place", fails)
    report = introspection.report(state())
    assert report.run_id == 3
    assert report.busy_s > 0
    assert report.where == ""


def test_first_collective_of_a_long_queue_is_told_with_its_line_however_many_are_queued_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's record as NCCL keeps it: collectives queued on the GPU stay ``scheduled`` until their turn comes."""
    frames = [{"name": "all_reduce", "filename": torch.distributed.__file__, "line": 3245}]
    frames += [{"name": "step", "filename": __file__, "line": number} for number in (4, 1)]
    entries = [
        {
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "process_group": ("0", "default_pg"),
            "state": "completed" if number < 3 else "scheduled",
            "frames": frames,
        }
        for number in range(100)
    ]
    dump = SimpleNamespace(_dump_nccl_trace=lambda *parts: pickle.dumps({"entries": entries}))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", dump)
    first, *others = introspection.recent_collectives()
    assert (first.sequence, first.where, first.done) == (3, "test_introspection.py, line 4", False)
    assert first.code == linecache.getline(__file__, 4).strip()
    assert [one.sequence for one in others] == list(range(80, 100))
