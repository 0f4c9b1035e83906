"""A notebook cell as a notebook runs it: all statements, and the value of the last expression."""

from __future__ import annotations

import ast
from typing import Any


def run_cell(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Run a cell in a namespace.

    Returns:
        The value of its last line if that is an expression and does not end with a semicolon, else None.

    Raises:
        BaseException: Whatever the cell raises.

    Ranks: local.
    """
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, filename, "exec"), namespace)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), filename, "exec"), namespace)
    value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)
    return None if is_silenced(source) else value


def is_silenced(source: str) -> bool:
    """Whether the cell ends with a semicolon, which keeps its last value from being shown."""
    code = [line.partition("#")[0].rstrip() for line in source.rstrip().splitlines()]
    return bool(code) and code[-1].endswith(";")


def text_of(value: Any) -> str:
    """What a notebook without graphics shows for a value: Markdown as its source, the rest as IPython prints it."""
    from IPython.core.formatters import DisplayFormatter

    # As the notebook asks: what a value says about itself as a whole comes before its repr.
    bundle, _ = DisplayFormatter().format(value, include={"text/plain", "text/markdown"})
    return str(bundle.get("text/markdown") or bundle.get("text/plain", ""))
