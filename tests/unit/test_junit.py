"""The report of ``labkit run`` for continuous integration, and refusals before anything runs."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import nbformat
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_notebook

from labkit.cli import main
from labkit.course.files import OverwriteError, plain
from labkit.course.running import runner
from labkit.course.running.execution import NotebookResult, Status
from labkit.course.running.junit import require_place, write_report

# An error as IPython shows it; the message has characters that XML cannot hold, and some that it has to quote.
TRACEBACK = """\
cell 3 (id abc); 1 code cell after it was not run. -------------------------------------
ValueError                                Traceback (most recent call last)
Cell In[3], line 1
----> 1 f()

ValueError: <b>&"]]>\x00\x1b]0;title\x07\ud800\ufffe"""


def _report(tmp_path: Path, *results: NotebookResult) -> ET.Element:
    path = tmp_path / "reports" / "junit.xml"
    write_report(results, path)
    return ET.parse(path).getroot()


def _result(status: Status, error: str = "", name: str = "lab.ipynb") -> NotebookResult:
    # As an attempt returns it: characters that control a terminal are escaped.
    return NotebookResult(Path(name), Path("out") / name, status, 1.5, plain(error), "cell 3 (id abc)", ("cell 4 (id d)",))


def test_one_suite_holds_one_case_a_notebook_and_counts_what_became_of_them(tmp_path: Path) -> None:
    ended: dict[Status, str] = {
        "passed": "",
        "failed": "failure",
        "output cut": "failure",
        "timed out": "error",
        "died": "error",
        "interrupted": "error",
        "not run": "skipped",
    }
    root = _report(tmp_path, *(_result(status, f"{status}!", f"{status}.ipynb") for status in ended))
    (suite,) = root
    assert {tuple(element.get(name) for name in ("tests", "failures", "errors", "skipped")) for element in (root, suite)} == {
        ("7", "2", "3", "1")
    }
    assert float(suite.get("time")) == 7 * 1.5
    for case, (status, tag) in zip(suite, ended.items(), strict=True):
        assert (case.tag, case.get("name"), case.get("file"), case.get("time")) == (
            "testcase",
            f"{status}.ipynb",
            f"{status}.ipynb",
            "1.500",
        )
        assert [child.tag for child in case] == [tag] * bool(tag)


def test_a_failure_holds_the_traceback_and_its_message_the_cell_and_what_was_raised(tmp_path: Path) -> None:
    (failure,) = _report(tmp_path, _result("failed", TRACEBACK)).iter("failure")
    raised = r"""ValueError: <b>&"]]>\x00\x1b]0;title\x07\ud800\ufffe"""
    assert failure.get("message") == f"failed: cell 3 (id abc); 1 code cell after it was not run. {raised}"
    assert "----> 1 f()" in failure.text
    assert failure.text.endswith(f"{raised}\nnot run: cell 4 (id d)")


@pytest.mark.parametrize(
    "error", ["", "The kernel's process ended (killed by SIGKILL).\nlast words", "RankError: rank 1\nRankError: rank 1"]
)
def test_a_message_is_the_first_line_where_nothing_else_was_raised(tmp_path: Path, error: str) -> None:
    (found,) = _report(tmp_path, _result("died", error)).iter("error")
    assert found.get("message") == f"died: {error.partition(chr(10))[0]}"


def test_a_notebook_s_name_may_be_anything(tmp_path: Path) -> None:
    name = "<&\"'\n\x00\udcff>.ipynb"
    (case,) = _report(tmp_path, _result("passed", name=name)).iter("testcase")
    assert case.get("name") == r"""<&"'\n\x00\udcff>.ipynb"""


@contextmanager
def somebody_else() -> Iterator[None]:
    """Drop root's rights inside the block only, because pytest itself writes files as root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("report", ["report.xml", "new/report.xml"])
def test_a_folder_that_one_may_not_write_to_is_told_beforehand(report: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # only root can enter pytest's own folders
        os.chmod(folder, 0o555)
        told = re.escape(f"{report} cannot be written: {os.strerror(errno.EACCES)}")
        with somebody_else(), pytest.raises(OverwriteError, match=told):
            require_place(Path(folder) / report, ())
        os.chmod(folder, 0o755)


@pytest.mark.parametrize("report", ["file/report.xml", "file/new/report.xml", "x" * 300])
def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    nbformat.write(new_notebook(), tmp_path / "lab.ipynb")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(runner, "Attempt", lambda *_: pytest.fail("a notebook was started"))
    result = CliRunner().invoke(main, ["run", "lab.ipynb", "--out", "out", "--junit", report])
    assert result.exit_code == 2, result.output
    reason = os.strerror(errno.ENOTDIR if "file" in report else errno.ENAMETOOLONG)
    assert f"Error: {report} cannot be written: {reason}. Choose another name." in result.output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_system_that_nobody_may_write_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "supports_effective_ids", {os.access})
    monkeypatch.setattr(os, "statvfs", lambda _: ReadOnly)
    with pytest.raises(OverwriteError, match=re.escape(os.strerror(errno.EROFS))):
        require_place(tmp_path / "report.xml", ())


def test_a_report_that_cannot_be_written_after_the_run_is_told_by_its_name_and_the_summary_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nbformat.write(new_notebook(), tmp_path / "lab.ipynb")
    Path("reports").mkdir()

    def run(*_: object, **__: object) -> None:
        Path("out").mkdir()
        Path("reports").rmdir()
        Path("reports").write_text("in the way")

    monkeypatch.setattr(runner, "run_notebooks", run)
    result = CliRunner().invoke(main, ["run", "lab.ipynb", "--out", "out", "--junit", "reports/report.xml"])
    assert result.exit_code == 1, result.output
    assert f"Error: reports/report.xml cannot be written: {os.strerror(errno.ENOTDIR)}. Choose another name." in result.output
    assert Path("out/index.html").exists()
