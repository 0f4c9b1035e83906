"""Completion and inspection in ``%%spmd`` cells, with the names of the rank that the cell will run on.

Tab asks the completer of a rank, Shift+Tab its inspector. Both run in the rank's own shell, so they know its variables and not the
kernel's. If no pool is open, or no rank answers at once, the kernel's own answers are used.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable
from typing import Any

from labkit.base.ranks import parse_ranks
from labkit.controller.current import open_pool
from labkit.errors import LabkitError

# Keep this short, because a person waits for the list.
ANSWER_S = 2.0
_CELL = re.compile(r"%%spmd\b")
_RANKS = re.compile(r"--ranks[ =]+(\S+)")

Completion = tuple[int, int, str, str]


def complete(code: str, position: int) -> list[Completion] | None:
    """Return the completions of the rank's completer at a position of a ``%%spmd`` cell.

    Args:
        code: The cell, with the magic's line.
        position: The position of the cursor, in characters from the beginning.

    Returns:
        Start, end, text and type of each completion, positions as in ``code``; None if there is no rank to ask or it did not
        answer.

    Ranks: controller. Blocks for at most about ANSWER_S.
    """
    line, newline, cell = code.partition("\n")
    begin = len(line) + len(newline)
    if not newline or position < begin:
        return None
    found: list[Completion] | None = _ask(line, _completions_on_rank, cell, position - begin)
    return None if found is None else [(start + begin, end + begin, text, kind) for start, end, text, kind in found]


def inspect(code: str, position: int, detail_level: int = 0) -> dict[str, Any] | None:
    """Return the rank's inspection of the name at a position of a ``%%spmd`` cell.

    Args:
        code: The cell, with the magic's line.
        position: The position of the cursor, in characters from the beginning.
        detail_level: 0 for documentation, 1 for the source as well.

    Returns:
        A mime bundle; None if there is no rank to ask, or it did not answer or does not know the name.

    Ranks: controller. Blocks for at most about ANSWER_S.
    """
    from IPython.utils.tokenutil import token_at_cursor

    line, newline, cell = code.partition("\n")
    begin = len(line) + len(newline)
    name = token_at_cursor(cell, position - begin) if newline and position >= begin else ""
    bundle: dict[str, Any] | None = _ask(line, _inspect_on_rank, name, detail_level) if name else None
    return bundle


def _ask(line: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on the first rank that the magic's line names; return None if that is not possible."""
    pool = open_pool()
    if pool is None or not _CELL.match(line):
        return None
    with contextlib.suppress(LabkitError, ValueError):
        spec = _RANKS.search(line)
        rank = parse_ranks(spec[1].strip("'\"") if spec else None, pool.world_size)[0]
        return pool.run(function, *arguments, ranks=[rank], timeout_s=ANSWER_S)[rank]
    return None


def options(line: str) -> list[str]:
    """Return the options of ``%%spmd`` that the word at the end of a line can become."""
    with contextlib.suppress(ValueError):
        words = shlex.split(line)
        last = "" if line.endswith(" ") else words[-1]
        return [option for option in OPTIONS if option.startswith(last or "--") and option not in words[:-1]]
    return []


OPTIONS = ("--ranks", "--timeout", "--out", "--needs", "--tabs", "--expect")


# On the rank ---------------------------------------------------------------------------------------------------------


def _completions_on_rank(cell: str, position: int) -> list[Completion]:
    from IPython.core.completer import provisionalcompleter
    from IPython.core.interactiveshell import InteractiveShell

    completer = InteractiveShell.instance().Completer
    completer.use_jedi = False  # it would read torch's source; the rank knows the objects themselves
    with provisionalcompleter():
        return [(item.start, item.end, item.text, item.type or "") for item in completer.completions(cell, position)]


def _inspect_on_rank(name: str, detail_level: int) -> dict[str, Any] | None:
    from IPython.core.interactiveshell import InteractiveShell

    try:
        return dict(InteractiveShell.instance().object_inspect_mime(name, detail_level=detail_level))
    except KeyError:
        return None


# In the kernel -------------------------------------------------------------------------------------------------------


def register(shell: Any) -> None:
    """Make a notebook's shell ask the ranks for names. A second call changes nothing."""
    completer = getattr(shell, "Completer", None)
    if completer is not None and not any(matcher is _matcher for matcher in completer.custom_matchers):
        completer.custom_matchers.append(_matcher)
    kernel = getattr(shell, "kernel", None)
    if kernel is not None and not hasattr(kernel.do_inspect, "labkit"):
        kernel.do_inspect = _inspecting(kernel.do_inspect)


def _matcher(context: Any) -> Any:
    """Match the whole cell for IPython's completer. If a rank answers, no other matcher is used."""
    code = context.full_text
    nothing: dict[str, Any] = {"completions": [], "suppress": False}
    if not _CELL.match(code):
        return nothing
    position = _position(code, context.cursor_line, context.cursor_position)
    if context.cursor_line == 0:
        word = code[:position].rpartition(" ")[2]
        return _result([(text, "option") for text in options(code[:position])], word) if word.startswith("-") else nothing
    found = complete(code, position)
    if found is None:
        return nothing
    start = min((item[0] for item in found), default=position)
    # Use one fragment for all completions: those that begin later get the text before them.
    return _result([(code[start:begin] + text, kind) for begin, _, text, kind in found], code[start:position])


# These attributes tell IPython that this is a matcher of the new kind.
_matcher.matcher_api_version = 2  # type: ignore[attr-defined]
_matcher.matcher_identifier = "labkit.spmd"  # type: ignore[attr-defined]
_matcher.matcher_priority = 1000.0  # type: ignore[attr-defined]


def _result(found: list[tuple[str, str]], fragment: str) -> dict[str, Any]:
    from IPython.core.completer import SimpleCompletion

    completions = [SimpleCompletion(text=text, type=kind) for text, kind in found]
    return {"completions": completions, "matched_fragment": fragment, "suppress": True}


def _position(code: str, line: int, column: int) -> int:
    return sum(len(text) + 1 for text in code.split("\n")[:line]) + column


def _inspecting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``do_inspect`` for a kernel that first asks a rank if the cell is for the ranks."""

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        bundle = inspect(code, cursor_pos, detail_level)
        if bundle is None:
            return original(code, cursor_pos, detail_level, omit_sections)
        return {"status": "ok", "found": True, "data": bundle, "metadata": {}}

    do_inspect.labkit = True  # type: ignore[attr-defined]
    return do_inspect
