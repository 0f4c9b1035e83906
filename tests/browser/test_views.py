"""Live views in JupyterLab: they change while they are looked at, take the keyboard, and are tables in the saved notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import LabServer
from tests.browser.lab_page import LabPage

Open = Callable[[str], LabPage]

pytestmark = pytest.mark.timeout(240)

START = "%load_ext labkit\nimport labkit\npool = labkit.WorkerPool(2, device='cpu')\npool"
WORK = """%%spmd
import time
import torch.distributed as dist
until = time.monotonic() + 8
while rank == 0 and time.monotonic() < until:
    sum(range(10**5))
dist.barrier()"""


def test_the_pools_status_follows_a_running_cell_and_stays_as_a_table(open_notebook: Open, server: LabServer, shots: Path) -> None:
    tab = open_notebook(server.add("status.ipynb", START, "%pool", WORK, "pool.close()"))
    tab.run(0, 1)
    table = tab.cell(1).locator("table")
    assert table.locator("tbody tr").count() == 2
    assert "idle" in table.inner_text()
    assert "MiB" in table.inner_text()
    assert tab.cell(0).locator("table tbody tr").count() == 2  # the pool's own repr
    tab.screenshot(shots / "pool-status.png", 1)

    follow = tab.cell(1).get_by_role("button", name="Follow")
    follow.focus()
    tab.page.keyboard.press("Enter")
    tab.run(2, wait=False)
    tab.cell(1).locator("table tr", has_text="working").wait_for(timeout=20_000)
    waiting = tab.cell(1).locator("table tr", has_text="waiting")
    waiting.wait_for(timeout=20_000)
    assert "barrier" in waiting.inner_text()
    tab.screenshot(shots / "pool-status-following.png", 1)
    tab.wait_done()
    tab.cell(1).locator("table", has_text="idle").wait_for(timeout=20_000)
    assert "working" not in table.inner_text()

    tab.run(3)
    follow.wait_for(state="detached")
    assert table.locator("tbody tr").count() == 2
    assert all("widget-view" not in mime for output in tab.outputs(1) for mime in output["data"])
    assert tab.errors() == []


def test_tab_in_a_cell_for_the_ranks_offers_their_names_and_the_cell_is_coloured_as_python(
    open_notebook: Open, server: LabServer, shots: Path
) -> None:
    tab = open_notebook(server.add("names.ipynb", START, "%%spmd\nonly_on_ranks = 1", "%%spmd\ndef f(only_o"))
    tab.run(0, 1)
    tab.activate(2)
    tab.cell(2).locator(".cm-content").click()
    tab.page.keyboard.press("Control+End")
    assert tab.cell(2).locator(".cm-line span", has_text="def").count() == 1  # a keyword of its own, as in any Python cell
    tab.page.keyboard.press("Tab")
    offered = tab.page.locator(".jp-Completer-item", has_text="only_on_ranks")
    offered.wait_for(timeout=10_000)
    tab.screenshot(shots / "names-of-the-rank.png")
    tab.page.keyboard.press("Enter")
    offered.wait_for(state="hidden")
    assert tab.cells()[2]["source"] == "%%spmd\ndef f(only_on_ranks"

    tab.set_source(2, "%%spmd\nonly_on_ranks")
    tab.page.keyboard.press("Control+End")
    tab.page.keyboard.press("Shift+Tab")
    tab.page.locator(".jp-Tooltip", has_text="int").wait_for(timeout=10_000)


def test_output_in_tabs_is_live_takes_the_keyboard_and_is_there_again_after_reopening(
    open_notebook: Open, server: LabServer, shots: Path
) -> None:
    steps = (
        "%%spmd --tabs\nimport time\nfor step in range(16):\n    print('step', step, 'of the last' if rank == 1 else '')\n"
        "    time.sleep(0.1)\ntime.sleep(8)"
    )
    tab = open_notebook(server.add("tabs.ipynb", START, steps))
    tab.run(0)
    tab.run(1, wait=False)
    cell = tab.cell(1)
    live = cell.get_by_role("tab", name="rank 1")
    live.wait_for(timeout=20_000)
    live.click()
    cell.locator(".widget-html", has_text="step 15 of the last").wait_for(timeout=20_000)
    tab.screenshot(shots / "tabs-live.png", 1)
    tab.wait_done()

    def assert_tabs(tab: LabPage) -> None:
        heads = tab.cell(1).get_by_role("radio")
        assert heads.count() == 2
        parts = tab.cell(1).locator("section")
        assert [parts.nth(n).is_visible() for n in (0, 1)] == [True, False]
        heads.first.focus()
        tab.page.keyboard.press("ArrowRight")
        assert [parts.nth(n).is_visible() for n in (0, 1)] == [False, True]
        assert "step 15 of the last" in parts.nth(1).inner_text()

    assert_tabs(tab)
    assert tab.cell(1).get_by_role("tab").count() == 0
    tab.screenshot(shots / "tabs.png", 1)
    tab.save()
    tab.close()
    tab = open_notebook("tabs.ipynb")
    assert_tabs(tab)
    assert tab.errors() == []
