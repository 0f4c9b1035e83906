"""The JUnit report for continuous integration, with one test case per notebook."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree as ET

from labkit.course.files import has_mark, refuse_foreign, replace_file, shown
from labkit.course.running.execution import NotebookResult

_NAME = "labkit run"
_MARK = f'<testsuites name="{_NAME}"'
# With these statuses the notebook itself did not finish, which JUnit calls an error. With the others a cell failed: a failure.
_ENDED = ("timed out", "died", "interrupted")
# The line of a traceback with the exception and its message, not IPython's first line, which has only dashes and the name.
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b(?! +Traceback \().*", re.MULTILINE)


def require_place(path: Path, notebooks: Sequence[Path]) -> None:
    """Make sure that a report may be written.

    Raises:
        OverwriteError: The path is one of the notebooks, or a file that no earlier run wrote.
    """
    refuse_foreign(path, notebooks, _is_report)


def write_report(results: Sequence[NotebookResult], path: Path) -> None:
    """Write a report. A failure or error holds the failing cell's traceback and names the cells after it that did not run.

    Args:
        results: The result of :func:`labkit.course.running.runner.run_notebooks`.
        path: The file.

    Raises:
        OverwriteError: See `require_place`.
        PlaceError: A link that another user has made leads there.
        OSError: It cannot be written.
    """
    require_place(path, ())
    tags = [_tag(result) for result in results]
    counts = {
        "tests": str(len(results)),
        "failures": str(tags.count("failure")),
        "errors": str(tags.count("error")),
        "skipped": str(tags.count("skipped")),
        "time": f"{sum(result.seconds for result in results):.3f}",
    }
    root = ET.Element("testsuites", {"name": _NAME, **counts})
    suite = ET.SubElement(root, "testsuite", {"name": "notebooks", **counts})
    for result in results:
        suite.append(_case(result))
    ET.indent(root)
    text = f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'
    replace_file(path, text, _is_report, make=True)


def _is_report(file: BinaryIO) -> bool:
    return has_mark(file, _MARK)


def _tag(result: NotebookResult) -> str:
    """Return the name of the element that says how a notebook ended; empty if it passed."""
    if result.passed:
        return ""
    if result.status == "not run":
        return "skipped"
    return "error" if result.status in _ENDED else "failure"


def _case(result: NotebookResult) -> ET.Element:
    names = {"classname": _NAME, "name": shown(result.notebook), "file": shown(result.notebook)}
    case = ET.Element("testcase", {**names, "time": f"{result.seconds:.3f}"})
    tag = _tag(result)
    if tag == "skipped":
        ET.SubElement(case, tag, {"message": "the run was interrupted before it began"})
    elif tag:
        found = ET.SubElement(case, tag, {"type": result.status, "message": f"{result.status}: {_message(result.error)}"})
        found.text = "\n".join([result.error, *(f"not run: {cell}" for cell in result.not_run)])
    return case


def _message(error: str) -> str:
    """Return one line of an error: the cell, and the exception raised there. CI systems show it in their lists."""
    first = (error.splitlines() or [""])[0].rstrip("- ")
    raised = _RAISED.findall(error)
    return first if not raised or raised[-1] in first else f"{first} {raised[-1]}"
