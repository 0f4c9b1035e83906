"""A page that shows how a set of notebooks ran."""

from __future__ import annotations

import html
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from labkit.base.version import __version__
from labkit.course.files import has_mark, refuse_foreign, replace_file, shown
from labkit.course.running.execution import NotebookResult

PAGE = "index.html"
_MARK = '<meta name="generator" content="labkit run">'

# The word carries the verdict; the colour only makes it easier to find.
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0; border-bottom: 1px solid #8886; }
td.time { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.status { white-space: nowrap; font-weight: 600; color: light-dark(#a33c00, #ff9a5c); }
tr.passed td.status { color: light-dark(#00694c, #3fc79a); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; margin: .3rem 0; }
"""


def write_summary(results: Sequence[NotebookResult], out: Path, parameters: Mapping[str, Any]) -> Path:
    """Write ``index.html`` into ``out``: verdict, time and error of each notebook, with links to the executed copies.

    Args:
        results: The result of :func:`labkit.course.running.runner.run_notebooks`.
        out: The folder of the executed copies.
        parameters: The values that were passed to the notebooks.

    Returns:
        The path of the page.
    """
    passed = sum(result.passed for result in results)
    title = f"labkit run: {passed} of {len(results)} notebooks passed"
    given = ", ".join(f"{name} = {value!r}" for name, value in parameters.items()) or "the notebooks' own parameters"
    torch = importlib.metadata.version("torch")
    versions = f"labkit {__version__}, torch {torch}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    setting = f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}; {versions}; {given}"
    text = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{_MARK}\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<p>{html.escape(setting)}</p>\n"
        f"<table>\n<thead><tr><th>Notebook</th><th>Result</th><th>Time</th></tr></thead>\n<tbody>\n"
        f"{''.join(_row(result, out) for result in results)}</tbody>\n</table>\n</body>\n</html>\n"
    )
    page = require_place(out, ())
    replace_file(page, text, _is_summary)
    return page


def require_place(out: Path, notebooks: Sequence[Path]) -> Path:
    """Return the path of the page if it may be written.

    Raises:
        OverwriteError: The path is one of the notebooks, or a file that no earlier run wrote.
    """
    refuse_foreign(out / PAGE, notebooks, _is_summary)
    return out / PAGE


def _is_summary(file: BinaryIO) -> bool:
    return has_mark(file, _MARK)


def _row(result: NotebookResult, out: Path) -> str:
    name = html.escape(shown(result.notebook.name))
    if result.executed.exists():
        name = f'<a href="{quote(os.fsencode(os.path.relpath(result.executed, out)))}">{name}</a>'
    # Unfolded, because failures are the reason to read this page.
    error = f"<details open><summary>Error</summary><pre>{html.escape(result.error)}</pre></details>" if result.error else ""
    return (
        f'<tr class="{result.status.replace(" ", "-")}"><td>{name}{error}</td><td class="status">{result.status}</td>'
        f'<td class="time">{result.seconds:.1f} s</td></tr>\n'
    )
