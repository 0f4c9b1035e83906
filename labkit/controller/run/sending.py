"""Checks before anything is sent: the cell's syntax, whether the function can be pickled, the size of what it captures."""

from __future__ import annotations

import ast
import contextlib
import dis
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from labkit.errors import InvalidRunError, WireError
from labkit.wire.payload import Packed, pack

# A captured global of this size or more is probably there by accident.
WARN_BYTES = 64 * 1024 * 1024


def check_limit(timeout_s: Any) -> None:
    """Refuse a time limit that is neither None nor a positive number of seconds.

    Raises:
        InvalidRunError: It is neither.
    """
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and timeout_s > 0):
        raise InvalidRunError(
            f"timeout_s is a time limit in seconds, a number above 0, not {timeout_s!r}. Leave it out for no limit."
        )


def check_syntax(source: str, name: str) -> None:
    """Parse a cell as the ranks will.

    Args:
        source: The cell, with magics and top-level await.
        name: The file name for the message.

    Raises:
        SyntaxError: The cell cannot be parsed.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    transformed = TransformerManager().transform_cell(source)
    compile(transformed, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def pack_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, share_memory: bool) -> Packed:
    """Pack a function call.

    Raises:
        InvalidRunError: The function cannot be called.
        WireError: The function or an argument cannot be pickled; the message names it.
    """
    if not callable(function):
        raise InvalidRunError(f"pool.run calls a function, and {function!r:.80} cannot be called. Source text runs with %%spmd.")
    try:
        packed = _pack_with_companions((function, args, kwargs), share_memory)
    except WireError as error:
        parts = {f"argument {number}": value for number, value in enumerate(args)}
        parts |= {f"argument {name!r}": value for name, value in kwargs.items()}
        parts |= {f"the variable {name!r} that the function uses": value for name, value in captured(function).items()}
        parts["the function"] = function
        raise WireError(_blame(parts) or str(error)) from error
    if packed.payload.size_bytes + sum(frame.nbytes for frame in packed.frames) > WARN_BYTES:
        _warn_about_captures(function)
    return packed


def pack_variables(variables: Mapping[str, Any], *, share_memory: bool) -> Packed:
    """Pack variables for the ranks' namespaces.

    Raises:
        WireError: A value cannot be pickled; the message names the variable.
    """
    try:
        return _pack_with_companions(dict(variables), share_memory)
    except WireError as error:
        raise WireError(_blame({f"the variable {name!r}": value for name, value in variables.items()}) or str(error)) from error


def _blame(parts: Mapping[str, Any]) -> str | None:
    """Return the first of the named values that cannot be pickled, and why; None if all can."""
    for what, value in parts.items():
        try:
            pack(value, share_memory=False)
        except WireError as error:
            return f"{what} cannot be sent to the ranks: {error}"
    return None


def captured(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the globals and closure variables that travel with a function from a notebook or an inner function; else nothing."""
    function = getattr(function, "func", function)  # functools.partial
    function = getattr(function, "__func__", function)  # a bound method
    if not isinstance(function, types.FunctionType) or _travels_by_name(function):
        return {}
    together = {name: function.__globals__[name] for name in _global_names(function.__code__) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            together[name] = cell.cell_contents
    return {name: value for name, value in together.items() if not isinstance(value, types.ModuleType)}


def _travels_by_name(function: types.FunctionType) -> bool:
    """Return whether the ranks import the function from its module instead of receiving its code."""
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return function.__module__ != "__main__" and found is function


def _global_names(code: types.CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return names.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


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


def _pack_with_companions(value: Any, share_memory: bool) -> Packed:
    """Pack (value, companions, sources).

    Companions are the functions and classes of the notebook that the value refers to, by name. On the rank they get the same names
    in ``__main__``, so that pickle and torch.save find them there. Sources are the cells that define them, so that tracebacks on
    the rank show their lines.
    """
    own_names = vars(sys.modules["__main__"])
    companions: dict[str, Any] = {}
    sources: dict[str, tuple[list[str], int | None]] = {}

    def note(thing: Any) -> None:
        name: str = thing.__qualname__
        if own_names.get(name) is thing:
            companions[name] = thing
        for code in _codes(thing):
            if code.co_filename not in sources and (lines := _cell_lines(code.co_filename)):
                sources[code.co_filename] = (lines, cell_number(code.co_filename))

    # Pickle reaches companions and sources last, when pickling the value has filled them. Its memo makes the companions the same
    # objects that the value uses.
    return pack((value, companions, sources), share_memory=share_memory, on_by_value=note)


def _codes(thing: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function, or of a class's methods."""
    for candidate in (thing, *vars(thing).values()) if isinstance(thing, type) else (thing,):
        code = getattr(candidate, "__code__", None)
        if isinstance(code, types.CodeType):
            yield code


def _cell_lines(filename: str) -> list[str]:
    """Return a notebook cell's lines; empty for a real file, which the rank reads itself."""
    entry = linecache.cache.get(filename)
    return list(entry[2]) if entry is not None and len(entry) == 4 and entry[1] is None else []


def cell_number(filename: str) -> int | None:
    """Return the notebook's number of the cell with this file name; None for other files."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell.compile._filename_map.get(filename) if shell is not None else None
