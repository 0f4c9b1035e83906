"""The JUnit report for continuous integration, with one test case per notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from labkit.course.files import has_mark, refuse_foreign, replace_file, shown
from labkit.course.running.execution import NotebookResult

_NAME = "labkit run"
_MARK = f'<testsuites name="{_NAME}"'


def require_place(path: Path, notebooks: Sequence[Path]) -> None:
    """Make sure that a report may be written.

    Raises:
        OverwriteError: The path is one of the notebooks, or a file that no earlier run wrote.
    """
    refuse_foreign(path, notebooks, lambda found: has_mark(found, _MARK))


def write_report(results: Sequence[NotebookResult], path: Path) -> None:
    """Write a report. A failure holds the failing cell's error and names the cells after it that did not run.

    Args:
        results: The result of :func:`labkit.course.running.runner.run_notebooks`.
        path: The file.

    Raises:
        OverwriteError: See `require_place`.
        PlaceError: A link that another user has made leads there.
        OSError: It cannot be written.
    """
    require_place(path, ())
    not_run = sum(result.status == "not run" for result in results)
    counts = {
        "tests": str(len(results)),
        "failures": str(sum(not result.passed for result in results) - not_run),
        "errors": "0",
        "skipped": str(not_run),
        "time": f"{sum(result.seconds for result in results):.3f}",
    }
    root = ET.Element("testsuites", {"name": _NAME, **counts})
    suite = ET.SubElement(root, "testsuite", {"name": "notebooks", **counts})
    for result in results:
        suite.append(_case(result))
    ET.indent(root)
    text = f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'
    replace_file(path, text, make=True)


def _case(result: NotebookResult) -> ET.Element:
    names = {"classname": _NAME, "name": shown(result.notebook), "file": shown(result.notebook)}
    case = ET.Element("testcase", {**names, "time": f"{result.seconds:.3f}"})
    if result.status == "not run":
        ET.SubElement(case, "skipped", {"message": "the run was interrupted before it began"})
    elif not result.passed:
        first = (result.error.splitlines() or [""])[0]
        failure = ET.SubElement(case, "failure", {"type": result.status, "message": f"{result.status}: {first}"})
        failure.text = "\n".join([result.error, *(f"not run: {cell}" for cell in result.not_run)])
    return case
