"""Execution of a cell the way a notebook does it: all statements, and the value of the last expression."""

from __future__ import annotations
import __future__

import ast
from typing import Any, TypeGuard


def run_cell(source: str, filename: str, namespace: dict[str, Any], flags: int = 0) -> Any:
    """Run a cell in a namespace.

    Args:
        source: The cell's source.
        filename: The name to show in tracebacks.
        namespace: The cell's variables.
        flags: Compiler flags of ``from __future__`` features, in addition to those that the cell imports; see `future_flags`.

    Returns:
        The value of its last line if that is an expression and does not end with a semicolon, else None.

    Raises:
        BaseException: The cell raised it.

    Ranks: local.
    """
    tree = ast.parse(source, filename)
    flags |= future_flags(tree)
    # A notebook compiles each statement separately, so it allows these imports anywhere in a cell.
    tree.body = [statement for statement in tree.body if not is_future(statement)]
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, filename, "exec", flags, dont_inherit=True), namespace)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), filename, "exec", flags, dont_inherit=True), namespace)
    value = eval(compile(ast.Expression(last.value), filename, "eval", flags, dont_inherit=True), namespace)
    return None if is_silenced(source) else value


def is_future(statement: ast.stmt) -> TypeGuard[ast.ImportFrom]:
    """Return whether a statement is ``from __future__ import ...``."""
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__" and not statement.level


def future_flags(tree: ast.Module) -> int:
    """Return the ``compile`` flags for the features that a cell imports from ``__future__``."""
    names = [alias.name for statement in tree.body if is_future(statement) for alias in statement.names]
    return sum({getattr(__future__, name).compiler_flag for name in names})


def is_silenced(source: str) -> bool:
    """Return whether the cell ends with a semicolon, which keeps its last value from being shown."""
    code = [line.partition("#")[0].rstrip() for line in source.rstrip().splitlines()]
    return bool(code) and code[-1].endswith(";")


def text_of(value: Any) -> str:
    """Return what a text-only notebook shows for a value: the source of Markdown, else IPython's text."""
    from IPython.core.formatters import DisplayFormatter

    # Like a notebook: IPython prefers a value's _repr_mimebundle_ to its repr.
    bundle, _ = DisplayFormatter().format(value, include={"text/plain", "text/markdown"})
    return str(bundle.get("text/markdown") or bundle.get("text/plain", ""))
