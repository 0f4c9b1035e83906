"""``labkit run`` on small notebooks that pass, fail, hang, die or are misused."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import psutil
import pytest
from click.testing import CliRunner, Result

from labkit.cli import main
from labkit.course import execution
from labkit.course.runner import run_notebooks
from tests.conftest import MakeNotebook

pytestmark = pytest.mark.process


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "INTERRUPT_GRACE_S", 1.0)


def _labkit(*arguments: object) -> Result:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])
    finally:
        signal.signal(signal.SIGTERM, handler)


def _outputs(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells if cell.cell_type == "code" for output in cell.outputs)


def test_a_notebook_that_passes_leaves_an_executed_copy_and_exit_code_0(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    notebook = make_notebook("good", "import os\nprint(size * 2, repr(label), os.getcwd())")
    before = notebook.read_bytes()
    result = _labkit("run", notebook, "-p", "size", "21", "-p", "label", "two words")
    assert result.exit_code == 0, result.output
    assert _outputs(tmp_path / "build" / "notebooks" / "good.ipynb") == f"42 'two words' {tmp_path}\n"
    assert notebook.read_bytes() == before
    assert "1 of 1 notebooks passed" in result.output


def test_a_failing_notebook_shows_its_error_and_the_others_go_on(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    bad = make_notebook("bad", "def f():\n    raise ValueError('<what> went wrong')", "f()", "print('never')")
    good = make_notebook("good", "print('still here')")
    result = _labkit("run", bad, good, "--out", "out", "--jobs", "1")
    assert result.exit_code == 1
    assert "ValueError: <what> went wrong" in result.output
    assert "1 of 2 notebooks passed" in result.output
    assert _outputs(tmp_path / "out" / "good.ipynb") == "still here\n"
    assert "never" not in _outputs(tmp_path / "out" / "bad.ipynb")


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.rows: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a":
            self.links.append(values["href"])
        if tag == "tr" and "class" in values:
            self.rows.append(values["class"])

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_summary_page_links_the_copies_and_quotes_the_errors(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    notebooks = [make_notebook("a & b", "1"), make_notebook("bad", "raise ValueError('<b>bold</b>')")]
    _labkit("run", *notebooks, "--out", "out", "-p", "size", "2")
    page = _Page((tmp_path / "out" / "index.html").read_text())
    assert page.rows == ["passed", "failed"]
    assert page.links == ["a%20%26%20b.ipynb", "bad.ipynb"]
    assert "1 of 2 notebooks passed" in page.text
    assert "ValueError: <b>bold</b>" in page.text
    assert "size = 2" in page.text


def test_a_hanging_notebook_is_interrupted_and_shows_where_it_stood(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    result = _labkit("run", make_notebook("hangs", "import time\ntime.sleep(1000)"), "--out", "out", "--timeout", "4")
    assert result.exit_code == 1
    assert "timed out" in result.output
    assert "did not finish in 4 s; it was interrupted" in result.output
    assert "----> 2 time.sleep(1000)" in result.output


STUBBORN = """
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
first = not pathlib.Path("seen").exists()
pathlib.Path("seen").touch()
while first or always:
    time.sleep(0.1)
print("came through")
"""


@pytest.mark.usefixtures("impatient")
def test_a_kernel_that_stopped_answering_gets_a_second_attempt(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    notebook = make_notebook("stubborn", STUBBORN, parameters="always = False")
    (result,) = run_notebooks([notebook], tmp_path / "out", timeout_s=5)
    assert (result.status, result.attempts) == ("passed", 2)
    assert _outputs(result.executed) == "came through\n"


@pytest.mark.usefixtures("impatient")
def test_a_kernel_that_never_answers_is_killed_twice_and_reported(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    notebook = make_notebook("stubborn", STUBBORN, parameters="always = True")
    finished: list[int] = []
    (result,) = run_notebooks([notebook], tmp_path / "out", timeout_s=3, on_cell=lambda path, done, total: finished.append(done))
    assert (result.status, result.attempts) == ("timed out", 2)
    assert max(finished) == 1, "the cell that hangs was counted as finished"
    assert "did not answer the interrupt and was killed" in result.error


@pytest.mark.parametrize(
    ("cell", "cause"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import ctypes\nctypes.string_at(0)", "killed by SIGSEGV"),
        ("import os\nos._exit(3)", "exit code 3"),
    ],
    ids=["SIGKILL", "SIGSEGV", "exit"],
)
def test_a_dead_kernel_is_reported_with_its_cause(cell: str, cause: str, make_notebook: MakeNotebook, tmp_path: Path) -> None:
    (result,) = run_notebooks([make_notebook("dies", cell)], tmp_path / "out", timeout_s=60)
    assert result.status == "died"
    assert cause in result.error
    assert result.executed.exists()


def test_what_a_dying_kernel_wrote_past_the_notebook_is_kept(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    cell = "import faulthandler, os, sys\nfaulthandler.enable(sys.__stderr__)\nos.abort()"
    (result,) = run_notebooks([make_notebook("dies", cell)], tmp_path / "out", timeout_s=60)
    assert "killed by SIGABRT" in result.error
    assert "Fatal Python error: Aborted" in result.error


def test_notebooks_of_the_same_name_get_copies_of_their_own(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    notebooks = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        notebooks.append(make_notebook(f"{name}/same", f"print('{name}')"))
    results = run_notebooks(notebooks, tmp_path / "out", timeout_s=60, jobs=2)
    assert [result.executed.name for result in results] == ["same.ipynb", "same-2.ipynb"]
    assert [_outputs(result.executed) for result in results] == ["one\n", "two\n"]


def test_a_file_that_is_no_notebook_fails_and_says_so(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    path = tmp_path / "broken.ipynb"
    path.write_text("{")
    (result,) = run_notebooks([path], tmp_path / "out", timeout_s=60)
    assert result.status == "failed"
    assert "JSON" in result.error


def test_two_jobs_run_at_the_same_time(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    meet = """
import pathlib, time
pathlib.Path(label).touch()
deadline = time.monotonic() + 30
while not all(pathlib.Path(name).exists() for name in ("left", "right")):
    assert time.monotonic() < deadline, "the other notebook did not come"
    time.sleep(0.05)
"""
    notebooks = [make_notebook(name, meet, parameters=f"label = '{name}'") for name in ("left", "right")]
    cells: list[tuple[str, int, int]] = []
    results = run_notebooks(
        notebooks, tmp_path / "out", timeout_s=60, jobs=2, on_cell=lambda path, done, total: cells.append((path.stem, done, total))
    )
    assert [result.status for result in results] == ["passed", "passed"]
    assert [event for event in cells if event[0] == "left"] == [("left", 0, 2), ("left", 1, 2), ("left", 2, 2)]


@pytest.fixture
def running(make_notebook: MakeNotebook, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``labkit run`` as a process of its own, in the middle of the first of two notebooks."""
    first = make_notebook("first", "import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(1000)")
    command = [sys.executable, "-c", "from labkit.cli import main; main()", "run", str(first), str(make_notebook("second", "1"))]
    process = subprocess.Popen([*command, "--jobs", "1", "--out", "out"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline, "the notebook did not start"
        assert process.poll() is None
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_kernels_and_still_writes_the_summary(
    signum: signal.Signals, running: subprocess.Popen[str], tmp_path: Path
) -> None:
    kernels = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signum)
    output, _ = running.communicate(timeout=40)
    assert running.returncode == 130
    assert kernels
    assert psutil.wait_procs(kernels, timeout=5)[1] == []
    assert "interrupted" in output
    assert "0 of 2 notebooks passed" in output
    assert _Page((tmp_path / "out" / "index.html").read_text()).rows == ["interrupted", "not-run"]
