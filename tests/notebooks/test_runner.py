"""``labkit run`` on small notebooks that pass, fail, hang, die or are misused."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote_to_bytes
from xml.etree import ElementTree as ET

import nbformat
import psutil
import pytest
from click.testing import CliRunner, Result
from nbformat.v4 import new_markdown_cell

from labkit.base.limits import other_limits
from labkit.cli import main
from labkit.course.files import NotebookError
from labkit.course.parameters import known_parameters
from labkit.course.running import outputs
from labkit.course.running.execution import Attempt
from labkit.course.running.runner import run_notebooks
from labkit.course.running.summary import write_summary
from tests.conftest import MakeNotebook
from tests.matrix import matrix

pytestmark = pytest.mark.process


# The time limit of notebooks that are to run out of time: long enough for a kernel to start on a busy machine. Once the notebook
# has reached the right place, `Clock` skips the rest.
TIMEOUT_S = 100
HERE = "open('here', 'w').close()"


class Clock:
    """A clock that runs normally until a notebook reports that it is ready, and reaches the deadline some seconds later.

    Attributes:
        goes_on_s: The seconds between the two.
    """

    def __init__(self, sign: Path) -> None:
        self._sign, self.goes_on_s = sign, 1.0
        self._began = time.monotonic()
        self._there: float | None = None

    def __call__(self) -> float:
        now = time.monotonic()
        if self._there is None and self._sign.exists():
            self._there = now
        if self._there is None or now < self._there + self.goes_on_s:
            return now
        return self._began + TIMEOUT_S + now - (self._there + self.goes_on_s)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for the deadline of a notebook that contains HERE."""
    clock = Clock(tmp_path / "here")
    monkeypatch.setattr(Attempt, "clock", staticmethod(clock))
    return clock


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


@pytest.mark.usefixtures("clock")
def test_a_hanging_notebook_is_interrupted_and_shows_where_it_stood(make_notebook: MakeNotebook) -> None:
    hangs = make_notebook("hangs", f"import time; {HERE}\ntime.sleep(1000)")
    with other_limits(notebook_interrupt_s=20.0):  # a busy machine may take long for a traceback
        result = _labkit("run", hangs, "--out", "out", "--timeout", TIMEOUT_S)
    assert result.exit_code == 1
    assert "timed out" in result.output
    assert f"did not finish in {TIMEOUT_S} s; it was interrupted" in result.output
    assert "----> 2 time.sleep(1000)" in result.output


PRINTING = f"import sys\n{HERE}\nwhile True:\n    sys.stdout.write({{!r}} * 1000)"
STUBBORN = f"import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('kept')\n{HERE}\ntime.sleep(1000)"
SPAWNING = (
    "import subprocess, time\nscript = 'trap \"\" INT HUP TERM; while :; do echo printed by a child; done'\n"
    f"print(subprocess.Popen(['sh', '-c', script], start_new_session=True).pid)\n{HERE}\ntime.sleep(1000)"
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *matrix(
            ("one line", PRINTING.format("x")),
            ("lines", PRINTING.format("line\n")),
            ("returns", PRINTING.format("\r")),
            ("backspaces", PRINTING.format("\b")),
            ("flushes", f"{HERE}\nwhile True:\n    print('.', end='', flush=True)"),
            ("displays", f"from IPython.display import HTML, display\n{HERE}\nwhile True:\n    display(HTML('<b>x</b>' * 50))"),
            ("past the notebook", f"import os\n{HERE}\nwhile True:\n    os.write(1, b'x' * 10_000)"),
        ),
        ("a kernel that ignores the interrupt", STUBBORN),
        ("a child that goes on", SPAWNING),
    ],
)
def test_s7_a_notebook_has_ended_5_s_after_its_time_whatever_it_prints(
    make_notebook: MakeNotebook, tmp_path: Path, clock: Clock, name: str, cell: str
) -> None:
    clock.goes_on_s = 5.0  # enough to print more than is kept
    notebook = make_notebook("prints", "print('before')", cell, "print('never')")
    before = {process.pid for process in psutil.process_iter()}
    result = _labkit("run", notebook, "--out", "out", "--timeout", TIMEOUT_S)
    assert result.exit_code == 1
    seconds = float(re.search(r"timed out +([0-9.]+) s", result.output)[1])
    assert TIMEOUT_S <= seconds < TIMEOUT_S + 5, result.output
    assert "cell 3 " in result.output
    assert "1 code cell after it was not run" in result.output
    copy = nbformat.read(tmp_path / "out" / "prints.ipynb", as_version=4)
    assert "before" in _outputs(tmp_path / "out" / "prints.ipynb")
    assert copy.metadata.papermill.exception
    assert _Page((tmp_path / "out" / "index.html").read_text()).rows == ["timed-out"]
    assert [process for process in psutil.process_iter() if process.pid not in before and _is_of(process, tmp_path)] == []


def test_l6_a_notebook_that_kills_what_reads_it_leaves_no_daemon(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    daemon = "import os, signal, subprocess\nsubprocess.run(['setsid', 'sh', '-c', 'setsid sleep 1000 &'])\n"
    notebook = make_notebook("kills", daemon + "os.kill(os.getppid(), signal.SIGKILL)\nwhile True:\n    pass")
    result = _labkit("run", notebook, "--out", "out", "--timeout", "60")
    assert result.exit_code == 1
    assert "The process that ran the notebook ended" in result.output
    assert [process for process in psutil.process_iter() if process.pid not in before and _is_of(process, tmp_path)] == []


def _is_of(process: psutil.Process, folder: Path) -> bool:
    """Return whether any process works in a folder, as a kernel and its descendants do."""
    try:
        return Path(process.cwd()) == folder
    except psutil.Error:
        return False


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("clock")
def test_s7_a_reader_that_is_stuck_does_not_delay_the_deadline_and_the_copy_of_before_is_kept(
    make_notebook: MakeNotebook, tmp_path: Path
) -> None:
    # The kernel stops the process that reads its output, as a pattern that holds Python's lock would.
    stops = f"import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\n{HERE}\ntime.sleep(1000)"
    notebook = make_notebook("stops", "print('before')", stops, "print('never')")
    (result,) = run_notebooks([notebook], tmp_path / "out", timeout_s=TIMEOUT_S)
    assert result.status == "timed out"
    assert result.seconds < TIMEOUT_S + 5
    assert (result.cell.split()[:2], len(result.not_run)) == (["cell", "3"], 1)
    assert _outputs(result.executed).startswith("before\nlabkit run: this cell was running")


@pytest.mark.timeout(240)
def test_s7_output_beyond_the_limit_is_said_in_the_copy_the_summary_and_the_exit(
    make_notebook: MakeNotebook, tmp_path: Path
) -> None:
    notebook = make_notebook("much", "print('x' * 8_000_000)", "print('after')", "raise ValueError('y' * 1_000_000)")
    fine = make_notebook("bars", "for n in range(800_000):\n    print(n, end='\\r')\nprint('done')")
    result = _labkit("run", notebook, fine, "--out", "out")
    assert result.exit_code == 1
    text = _outputs(tmp_path / "out" / "much.ipynb")
    assert "labkit run keeps 5,000,000 characters of this cell's output; the rest was left out." in text
    assert "after\n" in text
    assert 5_000_000 < len(text) < 5_001_000
    assert "left out" in result.output
    assert "characters left out" in result.output
    page = _Page((tmp_path / "out" / "index.html").read_text())
    assert page.rows == ["failed", "passed"]
    assert "wrote more output than is kept" in page.text
    assert _outputs(tmp_path / "out" / "bars.ipynb") == "done\n"


def test_s7_a_notebook_whose_output_was_cut_does_not_pass(
    make_notebook: MakeNotebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "CELL_LIMIT", 1000)
    (result,) = run_notebooks([make_notebook("much", "print('x' * 2000)", "1")], tmp_path / "out", timeout_s=100)
    assert (result.status, result.passed, result.not_run) == ("output cut", False, ())


@pytest.mark.parametrize(
    ("text", "shown"),
    [("ab\rc\n", "c\n"), ("ab\r\n", "ab\r\n"), ("ab\r", "ab\r"), ("a\nbc\r\rd", "a\nd"), ("\r\ra\r\n", "a\r\n"), ("a\bb", "a\bb")],
)
def test_s7_a_carriage_return_takes_its_line_back_however_the_text_comes_in_pieces(text: str, shown: str) -> None:
    for size in range(1, len(text) + 1):
        stream = outputs.StreamText()
        for start in range(0, len(text), size):
            stream.add(text[start : start + size])
        assert (str(stream), stream.size) == (shown, len(shown))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "cell", ["exit()", *matrix("import sys\nsys.exit(0)", "import sys\nsys.exit(3)", "raise SystemExit('bye')", "quit()")]
)
def test_d_an_early_exit_fails_names_the_cell_and_counts_the_rest_as_not_run(
    make_notebook: MakeNotebook, tmp_path: Path, cell: str
) -> None:
    notebook = make_notebook("exits", "print('first')", cell, "print('second')", "print('third')")
    result = _labkit("run", notebook, "--out", "out")
    assert result.exit_code == 1
    assert "0 of 1 notebooks passed" in result.output
    assert re.search(r"cell 3 \(id \w+\); 2 code cells after it were not run", result.output)
    assert "SystemExit" in result.output
    assert _outputs(tmp_path / "out" / "exits.ipynb").startswith("first\n")
    assert "second" not in _outputs(tmp_path / "out" / "exits.ipynb")
    assert nbformat.read(tmp_path / "out" / "exits.ipynb", as_version=4).metadata.papermill.exception


def test_d_an_unknown_magic_is_told_with_its_reason_and_its_line(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    result = _labkit("run", make_notebook("magic", "x = 1\n%nosuch a b"), "--out", "out")
    assert result.exit_code == 1
    assert "UsageError: Line magic function `%nosuch` not found." in result.output
    assert "line 2: %nosuch a b" in result.output


VALUES = [
    "(1, 2)",
    "(1,)",
    "b'a\\x00'",
    "{1, 2}",
    "set()",
    "...",
    "[..., {'a': (None, True)}]",
    "1e999",
    "-1e999",
    "2j",
    "1_000",
    "'1'",
]


@pytest.mark.timeout(240)
def test_d_a_parameter_is_every_literal_that_python_has(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    names = [f"value_{number}" for number in range(len(VALUES))]
    notebook = make_notebook("literals", f"print([{', '.join(names)}])", parameters="\n".join(f"{name} = 0" for name in names))
    given = [part for name, value in zip(names, VALUES, strict=True) for part in ("-p", name, value)]
    result = _labkit("run", notebook, "--out", "out", *given)
    assert result.exit_code == 0, result.output
    assert _outputs(tmp_path / "out" / "literals.ipynb") == f"{[ast.literal_eval(value) for value in VALUES]}\n"


@pytest.mark.parametrize("value", ["{[]: 1}", "0x" + "f" * 5000, "\udcff"], ids=["key", "digits", "bytes"])
def test_s12_a_value_that_cannot_be_a_parameter_is_refused_in_a_line_and_nothing_runs(
    make_notebook: MakeNotebook, tmp_path: Path, value: str
) -> None:
    result = _labkit("run", make_notebook("good", "1"), "--out", "out", "-p", "size", value)
    assert result.exit_code == 2
    assert "Error: " in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("parameters", ["size = (", "%magic", "size = 1\x00"])
def test_s12_a_parameters_cell_that_is_no_python_is_told_by_its_notebook(
    make_notebook: MakeNotebook, tmp_path: Path, parameters: str
) -> None:
    with pytest.raises(NotebookError, match=r"odd\.ipynb, cell 1: its parameters cannot be read"):
        known_parameters(make_notebook("odd", "1", parameters=parameters))


@pytest.mark.parametrize("place", ["notebook", "link", "hard link", "folder", "linked folder", "index", "another's"])
def test_s5_a_run_writes_over_no_notebook_and_nothing_that_it_did_not_write(
    make_notebook: MakeNotebook, tmp_path: Path, place: str
) -> None:
    notebook, out = make_notebook("lab", "print(1)"), tmp_path / "out"
    out.mkdir()
    files = {
        "notebook": lambda: out.rmdir() or out.symlink_to(tmp_path),
        "link": lambda: (out / "lab.ipynb").symlink_to(notebook),
        "hard link": lambda: (out / "lab.ipynb").hardlink_to(notebook),
        "folder": (out / "lab.ipynb").mkdir,
        "linked folder": lambda: (out / "lab.ipynb").symlink_to(tmp_path),
        "index": lambda: (out / "index.html").write_text("mine"),
        "another's": lambda: (out / "lab.ipynb").write_bytes(notebook.read_bytes()),
    }
    files[place]()
    before = notebook.read_bytes(), sorted(tmp_path.rglob("*"))
    result = _labkit("run", notebook, "--out", "out")
    assert result.exit_code == 2
    assert "Error: " in result.output
    assert (notebook.read_bytes(), sorted(tmp_path.rglob("*"))) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
@pytest.mark.parametrize("place", ["copy", "summary", "report", "folder", "report's folder", "shared folder"])
def test_s5_a_run_replaces_no_file_and_follows_no_link_of_another_user(
    make_notebook: MakeNotebook, tmp_path: Path, place: str
) -> None:
    notebook, out, private = make_notebook("lab", "print(1)"), tmp_path / "out", tmp_path / "private"
    private.mkdir()
    command = ["run", notebook, "--out", "out", "--junit", "out/deep/report.xml"]
    assert _labkit(*command).exit_code == 0
    foreign = {"copy": "lab.ipynb", "summary": "index.html", "report": "deep/report.xml", "folder": "", "report's folder": "deep"}
    path = out / foreign.get(place, "")
    if "folder" in place and place != "shared folder":
        shutil.rmtree(path)
        path.symlink_to(private)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    before = sorted((path, path.lstat().st_ino, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    result = _labkit(*command)
    if place == "shared folder":
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == 2, result.output
    assert "another user" in result.output
    assert sorted((path, path.lstat().st_ino, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["lab.ipynb", "index.html", "report.xml"])
def test_s5_a_fifo_in_the_place_of_a_copy_a_summary_or_a_report_is_refused(
    make_notebook: MakeNotebook, tmp_path: Path, place: str
) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / place)
    result = _labkit("run", make_notebook("lab", "print(1)"), "--out", "out", "--junit", "out/report.xml")
    assert result.exit_code == 2, result.output
    assert "is a FIFO, and nothing is written to it" in result.output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a link to another user")
def test_s5_a_folder_exchanged_for_a_link_while_a_notebook_runs_costs_no_file_behind_it(
    make_notebook: MakeNotebook, tmp_path: Path
) -> None:
    exchange = "import os; os.rename('out', 'away'); os.symlink('.', 'out'); os.chown('out', 65534, 65534, follow_symlinks=False)"
    notebook = make_notebook("lab", exchange)
    before = notebook.read_bytes()
    result = _labkit("run", notebook, "--out", "out")
    assert result.exit_code == 1, result.output
    assert "another user" in result.output
    assert notebook.read_bytes() == before


def test_v4_a_folder_exchanged_for_another_of_mine_while_a_notebook_runs_costs_no_file_in_it(
    make_notebook: MakeNotebook, tmp_path: Path
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "lab.ipynb").write_text("the only copy of my work")
    (tmp_path / "precious" / "index.html").write_text("my page")
    notebook = make_notebook("lab", "import os; os.rename('out', 'away'); os.rename('precious', 'out')")
    result = _labkit("run", notebook, "--out", "out")
    assert result.exit_code == 1, result.output
    assert "was not written by this command" in result.output
    assert (tmp_path / "out" / "lab.ipynb").read_text() == "the only copy of my work"
    assert (tmp_path / "out" / "index.html").read_text() == "my page"
    assert sorted(os.listdir(tmp_path / "out")) == ["index.html", "lab.ipynb"]


def test_s5_a_copy_that_somebody_has_changed_is_refused_and_an_unchanged_one_replaced(
    make_notebook: MakeNotebook, tmp_path: Path
) -> None:
    notebook, copy = make_notebook("lab", "print(label)"), tmp_path / "out" / "lab.ipynb"
    assert _labkit("run", notebook, "--out", "out").exit_code == 0
    assert _labkit("run", notebook, "--out", "out", "-p", "label", "anew").exit_code == 0
    assert _outputs(copy) == "anew\n"
    mine = nbformat.read(copy, as_version=4)
    nbformat.write(mine, copy)  # saved as it is
    assert _labkit("run", notebook, "--out", "out").exit_code == 0
    mine.cells.append(new_markdown_cell("my notes"))
    nbformat.write(mine, copy)
    result = _labkit("run", notebook, "--out", "out")
    assert result.exit_code == 2
    assert "has been changed since" in result.output
    assert "my notes" in copy.read_text()


ODD_NAMES = matrix(["{x}", "-x", "two\nlines", os.fsdecode(b"\xff")], ["a b", 'it\'s "so"', "100%", "[bold]x", "ä" * 120])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", ODD_NAMES, ids=("syntax", "text"))
def test_s16_notebooks_of_any_name_run_and_become_scripts(make_notebook: MakeNotebook, tmp_path: Path, names: list[str]) -> None:
    notebooks = [make_notebook(name, "print(__name__)") for name in names]
    results = run_notebooks(notebooks, tmp_path / "out", parameters={"size": 2}, timeout_s=100)
    assert [result.status for result in results] == ["passed"] * len(names)
    assert [result.executed.stem for result in results] == names
    page = _Page(write_summary(results, tmp_path / "out", {}).read_text())
    assert [unquote_to_bytes(link) for link in page.links] == [os.fsencode(f"{name}.ipynb") for name in names]
    for number, notebook in enumerate(notebooks):
        told = _labkit("script", "-o", f"{number}.py", "--", notebook)
        assert told.exit_code == 0, told.output
        assert len(told.output.splitlines()) == 1
        compile(Path(f"{number}.py").read_text(), "script", "exec")


def test_s16_a_copy_whose_name_is_too_long_is_refused_in_a_line(make_notebook: MakeNotebook, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    notebooks = [make_notebook(f"{folder}/{'x' * 249}", "1") for folder in ("one", "two")]
    result = _labkit("run", *notebooks, "--out", "out")
    assert result.exit_code == 2
    assert "File name too long" in result.output


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


def test_a_report_for_ci_holds_times_the_failing_cell_s_error_and_the_cells_behind_it(
    make_notebook: MakeNotebook, tmp_path: Path
) -> None:
    bad = make_notebook("bad", "raise ValueError('<b>&\x1b]0;x\x07')", "print('never')")
    for _ in range(2):
        result = _labkit("run", make_notebook("good", "1"), bad, "--out", "out", "--junit", "reports/junit.xml")
        assert result.exit_code == 1
    root = ET.parse(tmp_path / "reports" / "junit.xml").getroot()
    assert {name: root.get(name) for name in ("tests", "failures", "skipped")} == {"tests": "2", "failures": "1", "skipped": "0"}
    good, failed = root.iter("testcase")
    assert float(good.get("time")) > 0
    assert len(good) == 0
    assert "ValueError: <b>&" in failed[0].text
    assert failed[0].get("message").startswith("failed: cell 2 (id ")
    assert re.search(r"^not run: cell 3 \(id \w+\)$", failed[0].text, re.MULTILINE)
    before = bad.read_bytes()
    assert _labkit("run", bad, "--out", "out", "--junit", bad).exit_code == 2
    assert bad.read_bytes() == before


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


@pytest.mark.parametrize("signum", matrix(signal.SIGINT, signal.SIGTERM))
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
