"""Tracebacks for people: the reader's own lines with their context, and one line per library frame.

IPython's own formatter parses every file on the stack. For a stack through torch.distributed that took 1.4 s on one rank, and 6 s
for four ranks at once on two cores.
"""

from __future__ import annotations

import linecache
import os
import site
import sysconfig
import traceback
from collections.abc import Callable, Iterator

CONTEXT_LINES = 2
# Endless recursion produces a thousand frames.
FIRST_FRAMES, LAST_FRAMES = 10, 30
_MACHINERY = ("/labkit/worker/", "/IPython/core/interactiveshell.py", "/IPython/core/async_helpers.py")
_LIBRARIES = tuple(
    {os.path.join(path, "") for path in (*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_paths()["stdlib"])}
)
# The folder of the package: labkit/, above base/.
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"

CellNumber = Callable[[str], int | None]


def format_error(error: BaseException, cell_number: CellNumber, *, own_lines_only: bool = False) -> str:
    """Format an error's traceback as text, innermost frame last, with the errors that led to it.

    Args:
        error: The error.
        cell_number: A function that returns the notebook's number of the cell with a given file name, None for other files.
        own_lines_only: Leave out library frames and the errors that led to this one, for errors whose message says everything.

    Returns:
        Text without a newline at its end.
    """
    told = traceback.TracebackException.from_exception(error)
    if own_lines_only:
        frames = [line for frame in told.stack if not is_library(frame.filename) for line in _frame(frame, cell_number)]
        return "\n".join([*frames, f"{type(error).__name__}: {error}"])
    return "\n".join(_lines(told, cell_number))


def own_place(error: BaseException, cell_number: CellNumber) -> str:
    """Return the innermost of the reader's own lines on the error's stack, ``Cell In[7], line 5``; empty if there is none."""
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not is_library(frame.f_code.co_filename)]
    if not own:
        return ""
    frame, line = own[-1]
    number = cell_number(frame.f_code.co_filename)
    return f"{f'Cell In[{number}]' if number is not None else frame.f_code.co_filename}, line {line}"


def _lines(error: traceback.TracebackException, cell_number: CellNumber) -> Iterator[str]:
    if error.__cause__ is not None:
        yield from _lines(error.__cause__, cell_number)
        yield f"\n{_CAUSE}\n"
    elif error.__context__ is not None and not error.__suppress_context__:
        yield from _lines(error.__context__, cell_number)
        yield f"\n{_CONTEXT}\n"
    frames = _without_own(error.stack)
    left_out = len(frames) - FIRST_FRAMES - LAST_FRAMES
    for position, frame in enumerate(frames):
        if left_out <= 0 or position < FIRST_FRAMES or position >= FIRST_FRAMES + left_out:
            yield from _frame(frame, cell_number)
        elif position == FIRST_FRAMES:
            yield f"... {left_out} frames left out ..."
    yield from "".join(error.format_exception_only()).rstrip("\n").split("\n")
    for number, inner in enumerate(error.exceptions or (), 1):
        yield f"--- error {number} of the group ---"
        yield from _lines(inner, cell_number)


def _without_own(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Leave out the outermost frames, which belong to the code that runs a cell."""
    frames = list(stack)
    while frames and any(place in _slashes(frames[0].filename) for place in _MACHINERY):
        frames.pop(0)
    return frames


def _frame(frame: traceback.FrameSummary, cell_number: CellNumber) -> Iterator[str]:
    number, line = cell_number(frame.filename), frame.lineno or 0
    place = f"Cell In[{number}]" if number is not None else frame.filename
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    yield f"{place}, line {line}{inside}"
    if number is None and is_library(frame.filename):
        return
    for shown in range(max(1, line - CONTEXT_LINES), line + CONTEXT_LINES + 1):
        text = linecache.getline(frame.filename, shown).rstrip("\n")
        if text:
            yield f"{'---->' if shown == line else '     '} {shown:>3} {text}"


def is_library(filename: str) -> bool:
    """Return whether a file belongs to an installed package or to Python itself, and not to the reader."""
    return filename.startswith((*_LIBRARIES, _OWN_FOLDER, "<frozen", "<string>"))


def _slashes(filename: str) -> str:
    return filename.replace(os.sep, "/")


def release_frames(error: BaseException) -> None:
    """Release what an error's frames hold, so that a failed cell's big tensors are freed before the next cell runs."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        todo += [one.__cause__, one.__context__]
