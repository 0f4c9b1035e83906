"""Progress of long tasks: a bar in a terminal that disappears, nothing elsewhere; checkpoint functions report their bytes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from labkit.base import progress
from labkit.base.progress import Task, running, task
from labkit.checkpoint import load, migrate, reshard, save, verify

SLOW = (
    "import time\nfrom labkit.base import progress\nprogress.SHOWN_AFTER_S = 0.1\n"
    "with progress.task('[b]migrate[/b]', 4 << 20) as present:\n    present.advance(1 << 20)\n    time.sleep(1)\nprint('done')"
)


def seen_in_a_terminal(code: str, **environment: str) -> str:
    """Return a program's output to stderr if that is a terminal."""
    mine, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=its, stdout=subprocess.PIPE, env=os.environ | {"TERM": "xterm"} | environment
    )
    os.close(its)
    shown = b""
    try:
        while part := os.read(mine, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    assert process.stdout is not None
    assert process.stdout.read() == b"done\n"
    assert process.wait(30) == 0
    os.close(mine)
    return shown.decode()


def test_a_terminal_shows_a_bar_with_its_bytes_and_takes_it_away() -> None:
    shown = seen_in_a_terminal(SLOW)
    assert "[b]migrate[/b]" in shown
    assert "1.0/4.2 MB" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K")  # the line is erased


def test_a_quick_task_and_ranks_above_zero_show_nothing() -> None:
    assert seen_in_a_terminal(SLOW.replace("0.1", "30")) == ""
    assert seen_in_a_terminal(SLOW, RANK="1") == ""


def test_the_outermost_task_is_the_one_that_runs_and_none_is_left_after_an_error() -> None:
    def fail() -> None:
        with task("outer", 10) as outer, task("inner"):
            assert running() is outer
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fail()
    assert running() is None


def test_what_goes_on_in_the_background_is_not_what_anybody_waits_for() -> None:
    seen: list[Task | None] = []

    def work() -> None:
        with task("in the background"):
            seen.append(running())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [None]


def test_saves_loads_and_migrations_tell_all_their_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tasks: list[Task] = []
    begin = Task.__init__

    def noted(self: Task, title: str, total_bytes: int | None) -> None:
        begin(self, title, total_bytes)
        tasks.append(self)

    monkeypatch.setattr(progress.Task, "__init__", noted)
    model = nn.Linear(64, 64)
    path = save(tmp_path / "store", {"model": model}, 3)
    load(tmp_path / "store", {"model": model})
    migrate(path, tmp_path / "model.safetensors")
    reshard(path, tmp_path / "two", 2)
    assert verify(path).ok
    by_title = {found.title: found for found in tasks}
    titles = ["save step 3", "read back step 3", "read the index", "check", "load", "migrate", "reshard", "verify"]
    assert list(by_title) == titles
    for found in by_title.values():
        assert found.total_bytes
        assert found.done_bytes >= 0.9 * found.total_bytes, found.title
    assert by_title["load"].done_bytes == by_title["migrate"].done_bytes == 64 * 65 * torch.float32.itemsize
