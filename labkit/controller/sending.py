"""What must be right before anything is sent: the cell's syntax, the function's picklability, the size of what it drags along."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from labkit.errors import WireError
from labkit.wire.payload import Packed, pack

# From this size on a captured global is more likely an accident than an intention.
WARN_BYTES = 64 * 1024 * 1024


def check_syntax(source: str, name: str) -> None:
    """Parse a cell as the ranks will.

    Args:
        source: The cell, with magics and top-level await.
        name: File name for the message.

    Raises:
        SyntaxError: The cell cannot be parsed.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    transformed = TransformerManager().transform_cell(source)
    compile(transformed, name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def pack_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, share_memory: bool) -> Packed:
    """Pack a function call.

    Raises:
        WireError: The function or an argument cannot be pickled; the message names which.
    """
    try:
        packed = pack((function, args, kwargs, _sources(function)), share_memory=share_memory)
    except WireError as error:
        raise WireError(_blame(function, args, kwargs) or str(error)) from error
    if packed.payload.size_bytes + sum(frame.nbytes for frame in packed.frames) > WARN_BYTES:
        _warn_about_captures(function)
    return packed


def _blame(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Which part of a call cannot be pickled."""
    parts = {f"argument {number}": value for number, value in enumerate(args)}
    parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
    parts |= {f"the variable {name!r} that the function uses": value for name, value in captured(function).items()}
    for what, value in parts.items():
        try:
            pack(value, share_memory=False)
        except WireError as error:
            return f"{what} cannot be sent to the ranks: {error}"
    return None


def captured(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The globals and closure variables that travel with a function from a notebook."""
    if not isinstance(function, types.FunctionType):
        return {}
    module = sys.modules.get(function.__module__ or "")
    if function.__module__ != "__main__" and module is not None:
        return {}  # a function of a module travels by name
    found = inspect.getclosurevars(function)
    together = {**found.globals, **found.nonlocals}
    return {name: value for name, value in together.items() if not isinstance(value, types.ModuleType)}


def _warn_about_captures(function: Callable[..., Any]) -> None:
    for name, value in captured(function).items():
        packed = pack(value, share_memory=False)
        size = packed.payload.size_bytes + sum(frame.nbytes for frame in packed.frames)
        if size > WARN_BYTES:
            warnings.warn(
                f"the function uses the notebook's variable {name!r} and takes all {size / 2**20:,.0f} MiB of it to each rank. "
                f"Send it once with pool.push({name}={name}) and use it there, or make it on the ranks.",
                stacklevel=4,
            )


def _sources(function: Callable[..., Any]) -> dict[str, tuple[list[str], int | None]]:
    """The source of the notebook cell that defines a function, so that tracebacks on the rank can show it."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    entry = linecache.cache.get(code.co_filename)
    if entry is None or len(entry) < 4 or entry[1] is not None:
        return {}  # a real file, which the rank reads itself
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    number = shell.compile._filename_map.get(code.co_filename) if shell is not None else None
    return {code.co_filename: (list(entry[2]), number)}
