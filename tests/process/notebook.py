"""Runs cells in a real Jupyter kernel and keeps the output of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class CellRun:
    """One executed cell.

    Attributes:
        number: Its number in the notebook, as in ``Cell In[3]``.
        outputs: Its outputs as the notebook file holds them.
    """

    number: int
    outputs: list[Any]

    def stream(self, name: str) -> str:
        """All text of ``stdout`` or ``stderr``."""
        return "".join(output.text for output in self.outputs if output.output_type == "stream" and output.name == name)

    @property
    def text(self) -> str:
        """The cell's output as plain text: streams, displays and the error, in order."""
        return "\n".join(filter(None, map(_text, self.outputs)))

    @property
    def error(self) -> Any:
        """The error output, or None: it has ename, evalue and traceback."""
        return next((output for output in self.outputs if output.output_type == "error"), None)

    @property
    def displays(self) -> list[dict[str, Any]]:
        """The mime bundles of displays and results."""
        return [output.data for output in self.outputs if "data" in output]


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return _ANSI.sub("", "\n".join(output.traceback))
    return str(output.data.get("text/plain", ""))


def run_cells(cells: Mapping[str, str], folder: Path, *, timeout_s: float = 60.0) -> dict[str, CellRun]:
    """Run the cells of a notebook in a kernel of its own, going on after errors.

    Args:
        cells: Source by name, in order.
        folder: The kernel's working directory.
        timeout_s: Limit for one cell.
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells.values()])
    client = NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return {
        name: CellRun(number, cell.outputs) for number, (name, cell) in enumerate(zip(cells, notebook.cells, strict=True), start=1)
    }
