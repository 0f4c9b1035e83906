"""Progress of slow cells: shown to a person while the cell runs, gone when it has ended, absent if nobody watches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from labkit.notebook.views.progress import Stage, present_stage, stage_html

LIMIT_S = 120.0


class Kernel:
    """A kernel whose frontend can ask a person, like JupyterLab, or cannot, like papermill."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": os.getcwd()})
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def displays(self, code: str, *, person: bool) -> list[dict[str, Any]]:
        """Run a cell and return every state of its displays, in order."""
        found: list[dict[str, Any]] = []

        def keep(message: dict[str, Any]) -> None:
            if message["msg_type"] in ("display_data", "update_display_data"):
                found.append(message["content"]["data"])

        reply = self.client.execute_interactive(
            code, allow_stdin=person, output_hook=keep, timeout=LIMIT_S, stdin_hook=lambda message: None
        )
        assert reply["content"]["status"] == "ok", reply
        return found

    def stop(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("progress"))
    kernel.displays("%load_ext labkit\nimport labkit\npool = labkit.WorkerPool(2, device='cpu')", person=False)
    yield kernel
    kernel.stop()


SLOW = "%%spmd\nimport time\ntime.sleep(4 if rank else 0.1)"


def test_a_long_run_counts_the_ranks_that_are_done_and_leaves_nothing(kernel: Kernel) -> None:
    *shown, last = kernel.displays(SLOW, person=True)
    assert shown
    assert all("1 of 2 ranks have finished" in data["text/plain"] for data in shown)
    assert '<progress value="1" max="2" aria-label="1 of 2 ranks have finished">' in shown[0]["text/html"]
    assert last == {"text/plain": "", "text/html": ""}


def test_where_nobody_watches_a_slow_cell_shows_nothing_of_its_own(kernel: Kernel) -> None:
    assert kernel.displays(SLOW, person=False) == []


def test_a_short_cell_and_one_that_runs_nothing_on_the_ranks_show_nothing(kernel: Kernel) -> None:
    assert kernel.displays("%%spmd\nx = 1", person=True) == []
    assert kernel.displays("import time\ntime.sleep(3)", person=True) == []


def test_a_call_of_the_pool_counts_too(kernel: Kernel) -> None:
    shown = kernel.displays("import time\nvalues = pool.run(time.sleep, 3.5)", person=True)
    assert "0 of 2 ranks have finished" in shown[0]["text/plain"]


def test_a_task_of_the_notebook_itself_says_how_many_bytes_are_done(kernel: Kernel) -> None:
    code = "import time\nfrom labkit.base.progress import task\n"
    code += "with task('migrate', 4 << 20) as moving:\n    moving.advance(1 << 20)\n"
    *shown, last = kernel.displays(code + "    time.sleep(3)", person=True)
    assert shown[0]["text/plain"].startswith("migrate: 1.0 of 4.0 MiB, ")
    assert '<progress value="1048576" max="4194304"' in shown[0]["text/html"]
    assert last == {"text/plain": "", "text/html": ""}


def test_what_ranks_say_of_a_long_task_is_shown_together(kernel: Kernel) -> None:
    cell = (
        "%%spmd\nimport time\nfrom labkit.base.progress import task\n"
        "with task('save step 3', 3 << 20) as writing:\n    writing.advance((1 + rank) << 20)\n    time.sleep(6)"
    )
    shown = kernel.displays(cell, person=True)
    # One of them may have begun before the other.
    together = next(data for data in shown if data["text/plain"].startswith("ranks 0-1: save step 3: 3.0 of 6.0 MiB, "))
    assert f'<progress value="{3 << 20}" max="{6 << 20}"' in together["text/html"]


def test_a_start_is_named_while_the_pool_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit import WorkerPool
    from labkit.controller.run.members import Members

    seen: list[Stage | None] = []
    original = Members.start

    def start(self: Members, *arguments: Any) -> None:
        seen.append(present_stage())
        original(self, *arguments)

    monkeypatch.setattr(Members, "start", start)
    with WorkerPool(3, device="cpu", replace=True):
        pass
    assert seen[0] is not None
    assert seen[0].what.startswith("Starting 3 ranks")
    assert seen[0].total is None
    assert present_stage() is None


def test_a_bar_says_in_words_what_it_shows() -> None:
    page = stage_html(Stage("1 of 4 ranks <have> finished", 1, 4), 12.3)
    assert page.startswith('<div role="status"><progress value="1" max="4" aria-label="1 of 4 ranks &lt;have&gt; finished">')
    assert page.endswith("finished, 12 s</div>")
    assert "<progress aria-label" in stage_html(Stage("Starting 2 ranks"), 3)
