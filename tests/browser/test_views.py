"""Live views in JupyterLab: they change while they are looked at, take the keyboard, and are plain HTML in the saved notebook."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import LabServer
from tests.browser.lab_page import LabPage

Open = Callable[[str], LabPage]

pytestmark = pytest.mark.timeout(240)

CELLS = {
    "start": "%load_ext labkit\nimport labkit\npool = labkit.WorkerPool(2, device='cpu', replace=True)\npool",
    "status": "%pool",
    "work": (
        "%%spmd --timeout 60\nimport pathlib\nimport torch.distributed as dist\n"
        "while rank == 0 and not pathlib.Path('followed').exists():\n    sum(range(10**5))\ndist.barrier()"
    ),
    "close": "pool.close()",
    "names": "%%spmd\nonly_on_ranks = 1",
    "typed": "%%spmd\ndef f(only_o",
    "tabs": (
        "%%spmd --tabs --timeout 60\nimport pathlib\nimport time\nfor step in range(16):\n"
        "    print('step', step, 'of the last' if rank == 1 else '')\n    time.sleep(0.05)\n"
        "while not pathlib.Path('read').exists():\n    time.sleep(0.05)"
    ),
    "planner": (
        "from labkit.notebook.views.planning import planner\n"
        "def predict(shards, dtype, blocks):\n"
        "    return {'parameters': 2**24 // shards, 'activations': 2**20 if blocks == 'recompute' else 2**22}\n"
        "planner(predict, ranks=[1, 2, 4, 8], dtypes=['float32'], blocks=['keep', 'recompute'], limits_mib=[4, 8, 16])"
    ),
    "checkpoint": (
        "import torch\nfrom labkit.checkpoint import open_checkpoint, save\n"
        "from labkit.notebook.views.checkpoint_browser import browse\n"
        "layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))\n"
        "browse(open_checkpoint(save('views-store', {'model': layers}, 1)))"
    ),
}
AT = {name: index for index, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def opened(open_for_module: Open, server: LabServer) -> LabPage:
    return open_for_module(server.add("views.ipynb", *CELLS.values()))


@pytest.fixture
def tab(opened: LabPage) -> LabPage:
    """The notebook with a fresh pool."""
    opened.run(AT["start"])
    return opened


def test_the_pools_status_follows_a_running_cell_and_stays_as_a_table(tab: LabPage, server: LabServer, shots: Path) -> None:
    tab.run(AT["status"])
    cell = tab.cell(AT["status"])
    table = cell.locator("table")
    assert table.locator("tbody tr").count() == 2
    assert "idle" in table.inner_text()
    assert "MiB" in table.inner_text()
    assert tab.cell(AT["start"]).locator("table tbody tr").count() == 2  # the pool's own repr
    follow = cell.get_by_role("button", name="Follow")
    follow.focus()
    tab.page.keyboard.press("Enter")
    tab.run(AT["work"], wait=False)
    waiting = cell.locator("table tr", has_text="waiting")
    waiting.wait_for(timeout=20_000)
    assert "barrier" in waiting.inner_text()
    # A rank that gets no processor for a moment counts as being in native code.
    cell.locator("table tr", has_text=re.compile("working|native")).wait_for(timeout=20_000)
    # The cell's own progress display while it runs long.
    tab.cell(AT["work"]).locator("progress").wait_for(timeout=20_000)
    tab.screenshot(shots / "pool-status.png", AT["status"])
    (server.root / "followed").touch()
    tab.wait_done()
    assert tab.cell(AT["work"]).locator("progress").count() == 0
    cell.locator("table", has_text="idle").wait_for(timeout=20_000)

    tab.run(AT["close"])
    follow.wait_for(state="detached")
    assert table.locator("tbody tr").count() == 2
    assert all("widget-view" not in mime for output in tab.outputs(AT["status"]) for mime in output["data"])
    assert tab.errors() == []


def test_tab_in_a_cell_for_the_ranks_offers_their_names_and_the_cell_is_coloured_as_python(tab: LabPage, shots: Path) -> None:
    tab.run(AT["names"])
    tab.set_source(AT["typed"], CELLS["typed"])
    tab.activate(AT["typed"])
    cell = tab.cell(AT["typed"])
    cell.locator(".cm-content").click()
    tab.page.keyboard.press("Control+End")
    assert cell.locator(".cm-line span", has_text="def").count() == 1  # a keyword of its own, as in any Python cell
    tab.page.keyboard.press("Tab")
    offered = tab.page.locator(".jp-Completer-item", has_text="only_on_ranks")
    offered.wait_for(timeout=10_000)
    tab.screenshot(shots / "names-of-the-rank.png", AT["typed"])
    tab.page.keyboard.press("Enter")
    offered.wait_for(state="hidden")
    assert tab.cells()[AT["typed"]]["source"] == "%%spmd\ndef f(only_on_ranks"

    tab.set_source(AT["typed"], "%%spmd\nonly_on_ranks")
    tab.page.keyboard.press("Control+End")
    tab.page.keyboard.press("Shift+Tab")
    tab.page.locator(".jp-Tooltip", has_text="int").wait_for(timeout=10_000)
    tab.page.keyboard.press("Escape")


def test_output_in_tabs_is_live_takes_the_keyboard_and_is_there_again_after_reopening(
    tab: LabPage, open_notebook: Open, server: LabServer, shots: Path
) -> None:
    tab.run(AT["tabs"], wait=False)
    cell = tab.cell(AT["tabs"])
    live = cell.get_by_role("tab", name="rank 1")
    live.wait_for(timeout=20_000)
    live.click()
    cell.locator(".widget-html", has_text="step 15 of the last").wait_for(timeout=20_000)
    tab.screenshot(shots / "tabs-live.png", AT["tabs"])
    (server.root / "read").touch()
    tab.wait_done()
    _assert_tabs(tab)
    assert cell.get_by_role("tab").count() == 0
    tab.screenshot(shots / "tabs.png", AT["tabs"])
    tab.save()
    again = open_notebook(tab.name)
    _assert_tabs(again)
    assert again.errors() == []


def test_a_moved_slider_draws_another_picture_and_the_picture_alone_is_left_when_the_pool_is_closed(
    tab: LabPage, shots: Path
) -> None:
    tab.run(AT["planner"])
    cell = tab.cell(AT["planner"])
    picture, caption = cell.locator("figure img"), cell.locator("figcaption")
    expect(caption).to_contain_text("1 rank as 1 x 1, float32, blocks: keep. 20.00 of 4 MiB: 16.00 MiB too much.")
    before = picture.get_attribute("src")
    slider = cell.get_by_role("slider").first
    slider.focus()
    tab.page.keyboard.press("ArrowRight")
    expect(caption).to_contain_text("2 ranks as 1 x 2")
    tab.page.keyboard.press("End")
    expect(caption).to_contain_text("8 ranks as 1 x 8, float32, blocks: keep. 6.00 of 4 MiB: 2.00 MiB too much.")
    assert picture.get_attribute("src") != before
    menus = cell.get_by_role("combobox")
    menus.first.select_option("2 x 4")  # its options follow from the number of ranks
    expect(caption).to_contain_text("8 ranks as 2 x 4, float32, blocks: keep. 8.00 of 4 MiB")
    menus.last.select_option("recompute")
    expect(caption).to_contain_text("5.00 of 4 MiB: 1.00 MiB too much.")
    tab.wait_pictures()
    tab.screenshot(shots / "planner.png", AT["planner"])
    assert tab.errors() == []

    tab.run(AT["close"])
    expect(slider).to_have_count(0)
    expect(caption).to_contain_text("8 ranks as 2 x 4")
    assert all("widget-view" not in mime for output in tab.outputs(AT["planner"]) for mime in output["data"])


def test_a_checkpoint_unfolds_by_keyboard_and_its_filter_narrows_it_down(
    tab: LabPage, open_notebook: Open, server: LabServer, shots: Path
) -> None:
    tab.run(AT["checkpoint"])
    cell = tab.cell(AT["checkpoint"])
    tree = cell.get_by_role("group", name="Tensors of a checkpoint")
    expect(tree).to_contain_text("12 of 12 tensors")
    line = cell.get_by_role("textbox", name="name")
    line.fill("3.weight")
    line.press("Enter")
    expect(tree).to_contain_text("1 of 12 tensors")
    expect(tree.locator("table")).to_contain_text("__0_0.distcp")
    line.fill("")
    line.press("Enter")
    expect(tree).to_contain_text("12 of 12 tensors")
    tab.screenshot(shots / "checkpoint.png", AT["checkpoint"])
    tab.run(AT["close"])
    expect(line).to_have_count(0)
    tab.save()

    again = open_notebook(tab.name)
    branch = again.cell(AT["checkpoint"]).locator("summary", has=again.page.locator("b", has_text=re.compile("^3$")))
    tensor = branch.locator("xpath=..").locator("summary", has_text="weight")
    expect(tensor).to_be_hidden()
    branch.focus()
    again.page.keyboard.press("Enter")
    expect(tensor).to_be_visible()
    tensor.focus()
    again.page.keyboard.press("Space")
    expect(tensor.locator("xpath=..").locator("table")).to_be_visible()
    assert again.errors() == []


def _assert_tabs(tab: LabPage) -> None:
    heads = tab.cell(AT["tabs"]).get_by_role("radio")
    assert heads.count() == 2
    parts = tab.cell(AT["tabs"]).locator("section")
    assert [parts.nth(n).is_visible() for n in (0, 1)] == [True, False]
    heads.first.focus()
    tab.page.keyboard.press("ArrowRight")
    assert [parts.nth(n).is_visible() for n in (0, 1)] == [False, True]
    assert "step 15 of the last" in parts.nth(1).inner_text()
