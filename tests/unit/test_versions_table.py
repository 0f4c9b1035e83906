"""The table of `make versions`: what is counted, and which row a run replaces."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from labkit.base import tried_versions
from tests import scripts

REPORT = """<testsuites><testsuite tests="5">
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><failure message="AssertionError: 1 | 2&#10;more">text</failure></testcase>
<testcase name="d"><error message="TraceError: gone: /tmp/x/y.py">text</error></testcase>
<testcase name="e"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_are_counted_with_their_first_line() -> None:
    assert scripts.load("versions").counts(REPORT) == (2, 2, 1, "c: AssertionError: 1 / 2; d: TraceError: gone: ...")


def test_a_later_run_of_the_same_replaces_its_row_alone() -> None:
    versions = scripts.load("versions")
    first = "| 2.15.0 | 3.11.7 | tests/unit | 1 | 2 | 3 | 2026-11-29 | x |"
    other = first.replace("tests/unit", "tests/process")
    later = first.replace("| 1 |", "| 4 |")
    table = versions.with_row(versions.with_row(versions.HEADER, first), other)
    assert versions.with_row(table, later) == f"{versions.HEADER}{other}\n{later}\n"


def test_a_row_names_its_tests_and_not_how_they_were_spread() -> None:
    named = scripts.load("versions").named
    assert named(["-n", "3", "--no-loadscope-reorder"]) == "all"
    assert named(["-n", "3", "--no-loadscope-reorder", "tests/unit", "-x"]) == "tests/unit -x"
    assert named(["tests/process/test_trace.py", "tests/process/test_soak.py", "-k", "a b"]) == "process: trace, soak -k 'a b'"


@pytest.mark.parametrize("name", ["TORCH", "PYTHON"])
def test_the_versions_are_those_of_the_package(name: str) -> None:
    assert scripts.load("versions").tried(name) == getattr(tried_versions, name)


@pytest.mark.parametrize(("failed", "code"), [("0", 0), ("2", 1)])
def test_the_exit_code_says_whether_a_test_has_failed(
    failed: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = scripts.load("versions")
    row = f"| 2.15.0 | 3.11.7 | tests/unit | 66 | {failed} | 3 | 2026-11-30 |  |"
    monkeypatch.setattr(versions, "TABLE", tmp_path / "VERSIONS.md")
    monkeypatch.setattr(versions, "run", lambda python, torch, arguments: row)
    monkeypatch.setattr(sys, "argv", ["versions", "--torch", "torch==2.15.0"])
    assert versions.main() == code
    assert (tmp_path / "VERSIONS.md").read_text() == f"{versions.HEADER}{row}\n"
