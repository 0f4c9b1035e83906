"""Runs of a notebook's script, and the output of notebook and script, cell by cell, in a form that can be compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# These differ in each run: a temporary folder, the address of an object, the number of a process, a time.
_CHANGING = re.compile(r"/\S*/labkit-lab\d\d-\w+|0x[0-9a-f]+|\bprocess \d+|\b[\d.]+ (?:ms|s)\b")
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?%?")
_RANK_LINE = re.compile(r"^\[rank \d+\] ")
_MARK = re.compile(r"^--- (\S+)$")

Shown = dict[str, list[str]]


def lines_of(text: str) -> list[str]:
    """The lines of a cell, without the parts that differ from run to run."""
    lines = (_CHANGING.sub("...", _ANSI.sub("", line)).rstrip() for line in text.splitlines())
    return [line for line in lines if line]


def without_numbers(lines: list[str]) -> list[str]:
    """The words of lines, whatever their numbers and the width of their columns."""
    return [" ".join(_NUMBER.sub("#", line).split()) for line in lines]


def of_script(stdout: str) -> Shown:
    """By cell, the lines that rank 0 printed."""
    shown: Shown = {}
    name = ""
    for line in stdout.splitlines():
        if mark := _MARK.match(line):
            name = mark[1]
            shown[name] = []
        elif name:
            shown[name] += lines_of(line)
    return shown


def of_notebook(executed: Path) -> Shown:
    """By cell, the lines that the notebook showed; of what ranks printed, that of rank 0."""
    shown: Shown = {}
    for cell in nbformat.read(executed, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        texts = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stdout":
                texts.append(_of_rank_0(output.text))
            elif "data" in output:
                texts.append(_text(output.data))
        shown[cell.id] = [line for text in texts for line in lines_of(text)]
    return shown


def _of_rank_0(text: str) -> str:
    kept = (line for line in text.splitlines() if not _RANK_LINE.match(line) or line.startswith("[rank 0] "))
    return "\n".join(_RANK_LINE.sub("", line) for line in kept)


def _text(data: Mapping[str, str]) -> str:
    return data.get("text/markdown") or data.get("text/plain", "")


def run_script(script: Path, cwd: Path, *, world_size: int = 2, timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Run a script under torchrun; exit code, what rank 0 printed, and the errors of all ranks."""
    logs = script.parent / "logs"
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size), "--log-dir", str(logs), "-r", "3", str(script)]
    # A session of its own, so that processes that the script leaves are ended with it.
    process = subprocess.Popen([sys.executable, *command], cwd=cwd, start_new_session=True, stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    said = "".join(file.read_text(errors="replace") for file in sorted(logs.rglob("stderr.log")))
    (stdout,) = logs.rglob("0/stdout.log")
    return process.returncode, stdout.read_text(), said + errors.decode(errors="replace")[-2000:]
