"""Notebooks in JupyterLab as a person uses them: they run, stop, restart, and come back as they were saved."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest
import zmq

from labkit.course.handouts.copies.cells import is_executed
from tests.browser.conftest import LabServer
from tests.browser.lab_page import LabPage
from tests.matrix import matrix
from tests.notebooks.conventions import NOTEBOOKS, ROOT
from tests.process.ports import listening

Open = Callable[[str], LabPage]
# The shortest notebook and one lab; the others are opened as another test has executed them.
RUN_HERE = tuple(path for path in NOTEBOOKS if path.stem.startswith(("00", "01")))
RANKS_GONE_S = 5.0

pytestmark = pytest.mark.timeout(240)


def _added(server: LabServer, path: Path, name: str = "") -> str:
    name = name or path.name
    shutil.copy(path, server.root / name)
    for extra in ("images", "checkpoints"):
        if (path.parent / extra).exists():
            shutil.copytree(path.parent / extra, server.root / extra, dirs_exist_ok=True)
    return name


def _assert_all_is_there(tab: LabPage) -> None:
    """Require that no cell shows an error, every figure cell a drawn picture, and every cell with an output something."""
    assert tab.errors() == []
    tab.wait_pictures()
    seen = tab.seen()
    code = [cell for cell in tab.cells() if cell["cell_type"] == "code"]
    for cell, pictures, text in zip(code, seen["pictures"], seen["texts"], strict=True):
        if "figure" in cell["metadata"].get("tags", []):
            assert pictures, f"cell {cell['id']} is to show a figure"
        assert all(width > 0 and shown > 50 for width, shown in pictures), f"cell {cell['id']}: {pictures}"
        if any(_shows_something(output) for output in cell["outputs"]):
            assert pictures or text, f"the outputs of cell {cell['id']} are not to be seen"


def _shows_something(output: dict[str, object]) -> bool:
    data = output.get("data")
    return bool(
        any(str(value).strip() for value in data.values()) if isinstance(data, dict) else str(output.get("text", "")).strip()
    )


@pytest.mark.parametrize("path", matrix(*RUN_HERE), ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_everything_again_when_it_is_reopened(
    open_notebook: Open, server: LabServer, shots: Path, path: Path
) -> None:
    tab = open_notebook(_added(server, path))
    tab.set_source(1, tab.cells()[1]["source"].replace("world_size = 4", "world_size = 2"))
    tab.run_all()
    code = [cell for cell in tab.cells() if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if not cell["execution_count"]] == []
    _assert_all_is_there(tab)
    figures = [index for index, cell in enumerate(tab.cells()) if "figure" in cell["metadata"].get("tags", [])]
    tab.screenshot(shots / f"{path.stem}-run.png", figures[-1])
    if path != RUN_HERE[0]:
        return  # one reopened notebook is enough
    before = tab.seen()
    tab.save()
    tab.close()

    tab = open_notebook(path.name)
    _assert_all_is_there(tab)
    assert tab.seen() == before
    tab.screenshot(shots / f"{path.stem}-reopened.png", figures[-1])


def _executed_copy(path: Path) -> Path:
    """A copy of exactly this notebook that papermill has executed, as tests/notebooks and `make run` leave it."""
    sources = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    copies = (ROOT / "build").glob(f"**/{path.name}")
    for copy in sorted(copies, key=lambda copy: copy.stat().st_mtime, reverse=True):
        notebook = nbformat.read(copy, as_version=4)
        failed = notebook.metadata.get("papermill", {}).get("exception")
        cells = [cell.source for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", ())]
        # Another run may be writing it just now.
        if cells == sources and not failed and is_executed(notebook):
            return copy
    pytest.skip(f"nothing has executed this {path.name}: run tests/notebooks first")


# Put the first notebook into the process whose JupyterLab has run it.
@pytest.mark.parametrize(
    "path", matrix(RUN_HERE[0], *(path for path in NOTEBOOKS if path not in RUN_HERE)), ids=lambda path: path.stem
)
def test_an_executed_copy_from_elsewhere_shows_everything(open_notebook: Open, server: LabServer, shots: Path, path: Path) -> None:
    # JupyterLab does not trust it: scripts and inline SVG are taken out of its outputs.
    tab = open_notebook(_added(server, _executed_copy(path), f"executed-{path.name}"))
    _assert_all_is_there(tab)
    figures = [index for index, cell in enumerate(tab.cells()) if "figure" in cell["metadata"].get("tags", [])]
    tab.screenshot(shots / f"{path.stem}-executed.png", figures[0] if figures else None)


START = "%load_ext labkit\nimport labkit\npool = labkit.WorkerPool(2, device='cpu', replace=True)"
HANG = "%%spmd\nimport torch.distributed as dist\nx = 10 + rank\nprint('waiting', flush=True)\nif rank == 0:\n    dist.barrier()"


@pytest.fixture(scope="module")
def hang(open_for_module: Open, server: LabServer) -> LabPage:
    """A notebook whose second cell hangs."""
    return open_for_module(server.add("hang.ipynb", START, HANG, "%%spmd\ndist.barrier()\nx", "1 + 1"))


def test_the_stop_button_ends_a_hang_and_the_next_cell_finds_its_variables(hang: LabPage, shots: Path) -> None:
    hang.run(0)
    hang.run(1, wait=False)
    # The hang explains itself before anybody presses a button.
    hang.cell(1).locator(".jp-OutputArea-output", has_text="rank 0 waits in barrier").first.wait_for(timeout=30_000)
    hang.press("notebook:interrupt-kernel")
    hang.wait_done()
    hang.screenshot(shots / "hang-stopped.png", 1)
    assert [output["ename"] for output in hang.outputs(1) if output["output_type"] == "error"] == ["RunInterrupted"]
    hang.run(2)
    assert "rank 0: 10" in hang.text(2)
    assert "rank 1: 11" in hang.text(2)


def test_a_restarted_kernel_leaves_no_worker(hang: LabPage, server: LabServer) -> None:
    hang.run(0)
    ranks = [process for process in server.descendants() if "labkit" in " ".join(_command_of(process))]
    hang.run(1, wait=False)
    hang.cell(1).locator(".jp-OutputArea-output", has_text="waiting").first.wait_for(timeout=30_000)
    assert len(ranks) >= 3, "the fork server and two ranks"
    hang.restart_kernel()
    deadline = time.monotonic() + RANKS_GONE_S
    while alive := [process for process in ranks if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still there after a restart: {alive}"
        time.sleep(0.05)
    hang.run(3)
    assert hang.text(3).strip().endswith("2")


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_h4_at_no_port_of_make_labs_kernel_can_outputs_be_read(open_notebook: Open, server: LabServer) -> None:
    """At the TCP ports that Jupyter opens by default, every user of the machine can read the output of cells."""
    tab = open_notebook(server.add("private.ipynb", "import os\nos.getpid()", "import time\ntime.sleep(2)\nprint('SEC' + 'RET')"))
    tab.run(0)
    (output,) = tab.cells()[0]["outputs"]
    ports = listening([int(output["data"]["text/plain"])])
    assert len(ports) <= 1  # ipykernel's own, which takes the output of forked processes, with a password, and sends nothing
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.linger = 0
        reader.subscribe(b"")
        for address, port in ports:
            reader.connect(f"tcp://{address}:{port}")
        tab.run(1)
        assert "SECRET" in str(tab.cells()[1]["outputs"])
        assert not reader.poll(500)
