"""One line instead of a traceback, for a cell that reaches an unsolved exercise."""

from __future__ import annotations

import linecache
import traceback
from types import TracebackType
from typing import Any

_HOLE = ("# YOUR CODE HERE", "raise NotImplementedError")


def show_in_one_line(shell: Any) -> None:
    """Make IPython show an error of a hole as one line, and others as before. Do nothing if another handler is set.

    A hole replaces a solution in a students' copy: the comment ``# YOUR CODE HERE``, and a bare NotImplementedError below it.
    """
    if not shell.custom_exceptions:
        shell.set_custom_exc((NotImplementedError,), _show)


def _show(shell: Any, kind: type, error: BaseException, trace: TracebackType | None, tb_offset: int | None = None) -> None:
    if (where := _hole(error, trace)) is None:
        lines = shell.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=tb_offset)
    else:
        lines = [f"{where} is not solved yet."]
    shell._showtraceback(kind, error, lines)


def _hole(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return the name of the unsolved function or exercise; None if the error is not a hole's."""
    frames = list(traceback.walk_tb(trace))
    if not frames or error.args:
        return None
    frame, line = frames[-1]
    lines = tuple(linecache.getline(frame.f_code.co_filename, number).strip() for number in (line - 1, line))
    if lines != _HOLE:
        return None
    name = frame.f_code.co_name
    return "This exercise" if name == "<module>" else name
