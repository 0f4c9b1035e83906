"""The magics ``%%spmd`` and ``%pool``. They parse their line and call the pool; a Python call can do everything they do."""

from __future__ import annotations

import argparse
import ast
import functools
import keyword
import re
import shlex
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NoReturn

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, needs_local_scope

from labkit.base.ranks import parse_ranks
from labkit.controller.current import current_pool, refuse_second_pool
from labkit.controller.pool import WorkerPool
from labkit.controller.start.launchers import fork_server
from labkit.errors import LabkitError, PoolStateError, RankFailedError
from labkit.notebook import holes
from labkit.notebook.expect import error_class, expect_error
from labkit.notebook.views import pool_view, progress, rank_names, rank_tabs


class MagicUsageError(LabkitError, ValueError):
    """The line of a magic cannot be read."""


class CellSyntaxError(LabkitError):
    """A ``%%spmd`` cell cannot be parsed; nothing was sent to the ranks.

    This is not a SyntaxError, because IPython shows a SyntaxError that a magic raises with the magic's own frames.

    Attributes:
        lineno: The line in the cell, counted from 1 with the magic's line.
    """

    def __init__(self, error: SyntaxError) -> None:
        self.lineno = error.lineno
        lines = "".join(traceback.format_exception_only(error)).rstrip("\n").split("\n")
        place = f"line {error.lineno} of the cell; nothing was sent to the ranks."
        super().__init__("\n".join([place, *lines[1:-1], lines[-1]]))


class _Parser(argparse.ArgumentParser):
    """A parser that raises an error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        # IPython fills in the braces that it can evaluate and leaves the others as they are.
        unfilled = re.search(r"\{[^{}]*\}", message)
        hint = f"\n{unfilled[0]} is not defined in this notebook. Run the cell that defines it." if unfilled else ""
        raise MagicUsageError(f"{self.prog}: {message}{hint}\n{self.format_usage().strip()}")


@functools.cache  # building the parser takes longer than using it
def _spmd_parser() -> _Parser:
    parser = _Parser(prog="%%spmd", add_help=False, description="Run this cell on the ranks of the pool.")
    parser.add_argument("--ranks", metavar="SPEC", help="run on these ranks only, such as 0-3,6")
    parser.add_argument("--timeout", metavar="S", type=float, help="interrupt the cell after S seconds")
    parser.add_argument("--out", metavar="NAME", help="keep the last expression's values as RankResults in NAME")
    parser.add_argument("--needs", metavar="N", type=int, default=1, help="skip the cell when the pool has fewer ranks")
    parser.add_argument("--tabs", action="store_true", help="show each rank's output in a tab; equal outputs share one")
    parser.add_argument("--expect", metavar="ERROR", help="the cell has to fail with this error, for example RankFailedError")
    return parser


@functools.cache
def _pool_parsers() -> dict[str, _Parser]:
    """Make one parser for each action, so that it refuses arguments of other actions and lists its own."""
    parsers = {name: _Parser(prog=f"%pool {name}", add_help=False) for name in ("status", "follow", "start", "restart", "close")}
    start = parsers["start"]
    start.add_argument("world_size", nargs="?", type=int, metavar="N", help="number of ranks")
    start.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    start.add_argument("--replace", action="store_true", help="close the open pool first")
    parsers["restart"].add_argument("ranks", nargs="*", metavar="RANKS", help="restart only these, such as 2 or 0-1,3")
    return parsers


@magics_class
class LabkitMagics(Magics):
    """labkit's magics."""

    @needs_local_scope
    @cell_magic
    def spmd(self, line: str, cell: str, local_ns: dict[str, Any] | None = None) -> None:
        """Run this cell on every rank of the pool.

        Usage: %%spmd [--ranks SPEC] [--timeout S] [--out NAME] [--needs N] [--tabs] [--expect ERROR]

        Variables persist on the ranks between cells. The value of the last expression is shown for each rank (equal values
        once), or kept in NAME with --out. Each line that a rank prints is shown with its rank in front, or in the rank's tab
        with --tabs.
        """
        options = _parse(_spmd_parser(), line)
        pool = current_pool()
        if pool.world_size < options.needs:
            self._say(f"skipped: this cell needs at least {options.needs} ranks, the pool has {pool.world_size}.")
            return
        if options.out is not None and (not options.out.isidentifier() or keyword.iskeyword(options.out)):
            raise MagicUsageError(f"%%spmd: --out takes a variable's name, not {options.out!r}")
        if options.expect is None:
            self._run(pool, options, line, cell)
            return
        try:
            expected = error_class(options.expect)
        except ValueError as error:
            raise MagicUsageError(f"%%spmd: {error}") from None
        with expect_error(expected):
            self._run(pool, options, line, cell)

    def _run(self, pool: WorkerPool, options: argparse.Namespace, line: str, cell: str) -> None:
        assert self.shell is not None
        ranks = parse_ranks(options.ranks, pool.world_size)
        if options.out is not None and not _ends_with_expression(self.shell, cell):
            raise MagicUsageError(
                f"%%spmd: --out {options.out} keeps the value of the cell's last expression, but this cell ends with a statement. "
                f"End the cell with the expression that {options.out} is to hold."
            )
        try:
            with rank_tabs.in_tabs(ranks) if options.tabs and pool.world_size > 1 else nullcontext() as screen:
                values = pool.run_cell(
                    _with_first_line(line, cell),
                    ranks=ranks,
                    timeout_s=options.timeout,
                    want_value=options.out is not None,
                    cell_number=_present_number(self.shell),
                    screen=screen,
                )
        except SyntaxError as error:
            raise CellSyntaxError(error) from None
        except RankFailedError as error:
            hints = _hints_for_kernel_names(error, self.shell.user_ns)
            if not hints:
                raise
            raise RankFailedError(error.failures, error.finished, [*error.notes, *hints], diagnosis=error.diagnosis) from None
        if options.out is not None:
            self.shell.user_ns[options.out] = values

    @line_magic
    def pool(self, line: str) -> None:
        """Show or steer the pool.

        Usage: %pool [status | follow | start [N] [--device auto|cpu|cuda] [--replace] | restart [RANKS] | close]

        The status is a table of the ranks; with follow it is updated once a second, also while later cells run.
        If only some ranks are restarted, the others keep their variables; without RANKS all are restarted.
        """
        action, _, rest = line.strip().partition(" ")
        action = action or "status"
        if action not in _pool_parsers():
            raise MagicUsageError(f"%pool: {action!r} is not an action. Write one of {', '.join(_pool_parsers())}.")
        options = _parse(_pool_parsers()[action], rest)
        if action == "start":
            if not options.replace:
                refuse_second_pool(f"close it (%pool close), or start this one in its place: %pool {line.strip()} --replace")
            pool = WorkerPool(options.world_size, options.device, replace=options.replace)
            assert self.shell is not None
            self.shell.user_ns["pool"] = pool
        elif action == "restart":
            pool = current_pool()
            pool.restart(",".join(options.ranks) or None)
        elif action == "close":
            pool = current_pool()
            pool.close()
        else:
            try:
                pool = current_pool()
            except PoolStateError:
                server = "warm" if fork_server.available() and fork_server.shared().warm else "warming up"
                self._say(f"no pool is open; the fork server is {server}. Start one with %pool start 4")
            else:
                pool_view.show_status(pool, follow=action == "follow")
            return
        self._say(repr(pool))

    @staticmethod
    def _say(text: str) -> None:
        from IPython.display import publish_display_data

        publish_display_data({"text/plain": text})


def _present_number(shell: Any) -> int:
    """Return the number of the running cell. IPython 9 increments execution_count at a cell's start, IPython 8 at its end."""
    result = getattr(shell.displayhook, "exec_result", None)
    number = getattr(result, "execution_count", None)
    return int(shell.execution_count if number is None else number)


def _parse(parser: _Parser, line: str) -> argparse.Namespace:
    try:
        words: Sequence[str] = shlex.split(re.sub(r",\s+", ",", line), comments=True)
    except ValueError as error:
        raise MagicUsageError(f"{parser.prog}: {error}\n{parser.format_usage().strip()}") from None
    return parser.parse_args(words)


def _hints_for_kernel_names(error: RankFailedError, kernel: Mapping[str, Any]) -> list[str]:
    """Return advice about names that the ranks lack and the kernel has, a sentence each."""
    lacking = [
        re.match(r"name '(\w+)' is not defined", failure.message) for failure in error.failures if failure.type_name == "NameError"
    ]
    names = dict.fromkeys(found[1] for found in lacking if found and found[1] in kernel)
    return [_hint_for_kernel_name(name, kernel[name]) for name in names]


def _hint_for_kernel_name(name: str, value: Any) -> str:
    if isinstance(value, WorkerPool):
        return f"{name} exists only in the kernel, which steers the ranks: use it in a cell without %%spmd."
    if isinstance(value, ModuleType):
        return f"The kernel has imported {name}, the ranks have not: import it in a %%spmd cell."
    return f"The kernel has {name}, the ranks do not: pool.push({name}={name}) sends it."


def _ends_with_expression(shell: Any, cell: str) -> bool:
    """Return whether the cell has a value. A cell that cannot be parsed is refused later, with the line of the error."""
    try:
        body = ast.parse(shell.transform_cell(cell)).body
    except SyntaxError:
        return True
    return bool(body) and isinstance(body[-1], ast.Expr)


def _with_first_line(line: str, cell: str) -> str:
    """Return the cell with the magic's line as a comment, so that the ranks count lines as the reader does."""
    if cell.lstrip().startswith("%%"):
        return cell  # another cell magic, which has to come first
    return f"# %%spmd {line}".rstrip() + "\n" + cell


def register(shell: Any) -> None:
    """Register the magics with a shell and let the fork server import torch in the background."""
    shell.register_magics(LabkitMagics)
    rank_names.register(shell)
    pool_view.register(shell)
    progress.register(shell)
    holes.show_in_one_line(shell)
    if fork_server.available():
        fork_server.shared()
