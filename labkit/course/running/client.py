"""Execution of a notebook's cells through its kernel, up to the first failure, with their outputs."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NotebookExecutionManager

from labkit.course.files import replace_file, shown
from labkit.course.running.outputs import NOTEBOOK_LIMIT, CellOutputs, shortened


class Channel:
    """The pipe to the process that waits for the notebook."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd

    def tell(self, **news: Any) -> None:
        """Send one line. It is not an error if the receiver has ended."""
        line = memoryview(json.dumps(news).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._fd, line) :]


class ExecutedCopy(NotebookExecutionManager):  # type: ignore[misc]  # papermill has no types
    """papermill's record of a run, saved atomically: if the reader is killed, the copy on disk is still a whole file."""

    def save(self, **_: Any) -> None:
        """Save the notebook as it is now."""
        replace_file(Path(self.output_path), nbformat.writes(self.nb), lambda _: True)


class Client(PapermillNotebookClient):  # type: ignore[misc]
    """A client that runs the cells. The first failure ends the notebook.

    Attributes:
        error: That failure, as text; empty if every cell ran.
        cut: The ids of cells whose output was cut.
    """

    def __init__(self, copy: ExecutedCopy, channel: Channel, cell_limit: int, **options: Any) -> None:
        super().__init__(copy, on_cell_executed=self._see_reply, **options)
        self.channel, self.cell_limit = channel, cell_limit
        self.error = ""
        self.cut: list[str] = []
        self._room = NOTEBOOK_LIMIT
        self._outputs = CellOutputs(NotebookNode(outputs=[]), 0)
        self._asked_to_exit = False

    def papermill_execute_cells(self) -> None:
        """Run the cells up to the first failure."""
        self.channel.tell(cells=[0, len(self.nb.cells)])
        for index, cell in enumerate(self.nb.cells):
            self._outputs = CellOutputs(cell, min(self.cell_limit, self._room))
            self.nb_man.cell_start(cell, index)
            try:
                self.execute_cell(cell, index)
                if self._asked_to_exit:
                    raise CellExecutionError("", "SystemExit", "the cell asked the kernel to end")
            except CellExecutionError as error:
                self.nb_man.cell_exception(cell, cell_index=index)
                self._outputs.finish()
                self.error = _failure(cell, error)
                return
            except BaseException:
                self.nb_man.cell_exception(cell, cell_index=index)
                raise
            finally:
                self._finish(index, cell)

    def _finish(self, index: int, cell: NotebookNode) -> None:
        self._room = max(0, self._room - self._outputs.size)
        if self._outputs.is_cut:
            self.cut.append(cell.id)
        self._outputs.finish()
        self.nb_man.cell_complete(cell, cell_index=index)
        self.channel.tell(cells=[index + 1, len(self.nb.cells)])

    def _see_reply(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        # exit() and quit() end the kernel after a successful reply.
        payload = execute_reply["content"].get("payload") or ()
        self._asked_to_exit = any(part.get("source") == "ask_exit" for part in payload)

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        """Process one message of the kernel, unless the cell has already produced too much output."""
        kind, content = msg["msg_type"], msg["content"]
        hooked = bool(self.output_hook_stack[msg["parent_header"].get("msg_id")])
        if kind == "stream" and not hooked:
            if self.clear_before_next_output:
                self._clear(cell, cell_index)
            self._outputs.stream("stderr" if content["name"] == "stderr" else "stdout", content["text"])
            return None
        if kind == "clear_output" and not hooked and not content.get("wait"):
            self._outputs.clear()
        if kind in ("execute_result", "display_data", "error", "stream") or kind.startswith(("update_", "comm")):
            if self.clear_before_next_output and not hooked and kind != "update_display_data":
                self._clear(cell, cell_index)
            if not (self._outputs.error(content) if kind == "error" else self._fits(msg)):
                return None
        found: NotebookNode | None = super().process_message(msg, cell, cell_index)
        return found

    def _fits(self, msg: dict[str, Any]) -> bool:
        content = msg["content"]
        sizes = [content, ["x" * len(part) for part in msg.get("buffers") or ()]]
        if msg["msg_type"].startswith("comm"):
            state = content.get("data", {}).get("state", {})
            return self._outputs.fits(sizes, ("comm", content.get("comm_id"), *sorted(map(str, state))) if state else None)
        if display := (content.get("transient") or {}).get("display_id"):
            places = sum(map(len, self._display_id_map.get(display, {}).values()))
            return self._outputs.fits(sizes, ("display", display), places + (msg["msg_type"] != "update_display_data"))
        return self._outputs.fits(sizes)

    def _clear(self, cell: NotebookNode, cell_index: int) -> None:
        cell.outputs[:] = []
        self.clear_display_id_mapping(cell_index)
        self._outputs.clear()
        self.clear_before_next_output = False


def _failure(cell: NotebookNode, error: CellExecutionError) -> str:
    """Return why a cell failed, and make sure that its outputs show it too: an unknown magic leaves only a line of text."""
    shown_error = next((output for output in reversed(cell.outputs) if output.output_type == "error"), None)
    if shown_error is None:
        where = _line_of_magic(cell.source, error.evalue) if error.ename == "UsageError" else ""
        text = f"{error.ename}: {shortened(error.evalue)}{where}"
        cell.outputs.append(nbformat.v4.new_output("error", ename=error.ename, evalue=text, traceback=[text]))
        return text
    text = "\n".join(shown_error.traceback) or f"{shown_error.ename}: {shown_error.evalue}"
    return f"The cell ended the notebook early.\n{text}" if error.ename == "SystemExit" else text


def _line_of_magic(source: str, message: str) -> str:
    """Name the first line that begins with the magic quoted in a message of IPython; return an empty text if there is none."""
    name = next((part for part in message.split("`")[1::2] if part.startswith("%")), None)
    for number, line in enumerate(source.splitlines(), start=1):
        if name and line.strip().startswith(name):
            return f"\nline {number}: {shown(line.strip()[:200])}"
    return ""
