"""Conversion of a notebook into a script for torchrun: ``%%spmd`` cells become plain code, and rank 0 runs the rest.

The script uses `labkit.spmd.script.torchrun`. Cells that demonstrate a failure are left out: with no pool to free the ranks, the
first one would end the script.
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from IPython.core.inputtransformer2 import TransformerManager

from labkit.course.files import has_mark, read_notebook, shown
from labkit.course.parameters import is_parameters, refuse_unknown, source_of
from labkit.errors import LabkitError
from labkit.spmd.script.cells import future_flags, is_future, is_silenced

# A cell with this tag makes sense only in the notebook, for example because it looks at the state after a failed cell.
NOTEBOOK_ONLY = "notebook-only"
_SPMD = re.compile(r"\A\s*%%spmd\b(?P<line>.*)\n?")
# labkit's magics that mean nothing in a script.
_DROPPED_LINES = re.compile(r"^(%load_ext labkit\b|%pool\b).*\n?", re.MULTILINE)
_WIDTH = 118
_WRITTEN = "as one script, written by `labkit script`."


class ScriptError(LabkitError, ValueError):
    """A cell of a notebook cannot be written as a script.

    Attributes:
        cell: Its id.
    """

    def __init__(self, notebook: Path, cell: str, what: str) -> None:
        self.cell = cell
        super().__init__(f"{shown(notebook.name)}, cell {cell}: {what}")


def write_script(notebook: Path, parameters: Mapping[str, Any] | None = None) -> str:
    """Return the script of a notebook.

    Args:
        notebook: The ``.ipynb`` file. It is only read.
        parameters: Values for names in the cell tagged ``parameters``.

    Returns:
        Python source. Under ``torchrun --nproc-per-node N`` it does what the notebook does with ``world_size = N``, prints what the
        cells show, and leaves out the cells that teach a failure.

    Raises:
        ScriptError: A cell uses a magic other than labkit's, ``!`` or top-level ``await``, or cannot be parsed.
        NotebookError: The file is not a notebook.
        UnknownParameterError: The notebook lacks one of ``parameters``.
    """
    cells = read_notebook(notebook).cells
    values = dict(parameters or {})
    if values:
        refuse_unknown(notebook, values)
    given = [f"{name} = {source_of(value)}" for name, value in values.items()]
    parts: list[str] = []
    futures: dict[str, None] = {}
    for index, cell in enumerate(cells):
        if cell.cell_type == "code":
            name, tags = cell.get("id") or str(index), set(cell.metadata.get("tags", ()))
            source = "\n".join([cell.source, *(given if is_parameters(cell) else [])])
            parts.append("\n".join(_cell(notebook, name, source, tags, futures)))
    return "\n\n".join([_head(notebook.name, futures), *parts, "job.end()"]) + "\n"


def _head(name: str, futures: Iterable[str]) -> str:
    """Return the script's beginning. The ``from __future__`` imports in its ``%%spmd`` cells must precede all other code."""
    titled, file = (_in_docstring(text) for text in (shown(name), shlex.quote(shown(f"{Path(name).stem}.py"))))
    imports = "".join(f"from __future__ import {feature}\n" for feature in futures)
    return f'''"""The cells of {titled} {_WRITTEN}

    torchrun --nproc-per-node 4 {file}

The %%spmd cells are plain code here and run on every rank. The cells of the notebook's own process are text in
`job.kernel(...)`: they run on rank 0, in a namespace of their own, as in the notebook.
"""

{imports}from labkit.spmd.script.torchrun import Job

job = Job.start(globals())'''


def _in_docstring(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def is_script(file: BinaryIO) -> bool:
    """Return whether a file is a script that `write_script` wrote."""
    return has_mark(file, _WRITTEN)


def _cell(notebook: Path, name: str, source: str, tags: set[str], futures: dict[str, None]) -> Iterator[str]:
    title = f"# Cell {name} "
    yield title + "-" * (_WIDTH - len(title))
    found = _SPMD.match(source)
    if NOTEBOOK_ONLY in tags:
        yield "# Left out: it only makes sense in the notebook."
    elif found is None:
        yield from _kernel_cell(notebook, name, source, tags)
    else:
        yield from _spmd_cell(notebook, name, found["line"], source[found.end() :], futures)


def _kernel_cell(notebook: Path, name: str, source: str, tags: set[str]) -> Iterator[str]:
    source = _DROPPED_LINES.sub("", source)
    _parse(notebook, name, source)
    source = source.replace("labkit.WorkerPool(", "script_pool(").strip("\n")
    more = ", parameters=True" if "parameters" in tags else ""
    if not source:
        yield "# Left out: it has only magics."
        return
    yield f"job.cell({name!r})"
    yield f"job.kernel({name!r}, {_literal(source)}{more})"


def _literal(source: str) -> str:
    """Return source as a string literal that is readable in the script."""
    for quotes in ("'''", '"""'):
        if quotes not in source and not source.endswith(quotes[0]):
            text = f"r{quotes}\n{source}\n{quotes}"
            if ast.literal_eval(text) == f"\n{source}\n":
                return text
    return repr(source)


def _spmd_cell(notebook: Path, name: str, line: str, body: str, futures: dict[str, None]) -> Iterator[str]:
    yield f"# %%spmd{line}".rstrip()
    options = _options(notebook, name, line)
    if options.expect is not None:
        yield f"# Left out: it teaches a failure, {options.expect}. Here it would end the script."
        return
    if options.timeout is not None:
        yield "# Its time limit is left out: nobody watches a script."
    tree = _parse(notebook, name, body)
    if hoisted := [statement for statement in tree.body if is_future(statement)]:
        futures.update(dict.fromkeys(alias.name for statement in hoisted for alias in statement.names))
        body = _without(body, hoisted)
        tree = ast.parse(body)
    yield f"job.cell({name!r})"
    last = tree.body[-1] if tree.body else None
    code, value = _divide(body, last if isinstance(last, ast.Expr) and not is_silenced(body) else None)
    ranks = None if options.ranks is None else _ranks(notebook, name, options.ranks)
    if options.needs == 1:
        yield from _on_ranks(code, value, options.out, ranks)
        return
    yield f"if world_size >= {options.needs}:"
    yield _indented("\n".join(_on_ranks(code, value, options.out, ranks)) or "pass")
    yield f"else:\n    job.skip({options.needs})"


def _without(body: str, statements: Iterable[ast.stmt]) -> str:
    """Return a cell without some statements; one that shares a line with others is replaced by ``pass``."""
    lines = body.encode().split(b"\n")
    for statement in reversed(list(statements)):
        assert statement.end_lineno is not None
        first, last = statement.lineno - 1, statement.end_lineno - 1
        before, after = lines[first][: statement.col_offset], lines[last][statement.end_col_offset :]
        alone = not before.strip() and (not after.strip() or after.lstrip().startswith(b"#"))
        lines[first : last + 1] = [] if alone else [before + b"pass" + after]
    return b"\n".join(lines).decode()


def _divide(body: str, last: ast.Expr | None) -> tuple[str, str]:
    """Split a cell into the statements before its last expression, with their comments, and the expression itself."""
    if last is None:
        return body.strip("\n"), ""
    lines = body.split("\n")
    before = lines[: last.lineno - 1]
    first_line = lines[last.lineno - 1].encode()
    # Keep statements before it on the same line, as in `a = 1; a`.
    before.append(first_line[: last.col_offset].decode().rstrip().rstrip(";"))
    expression = "\n".join([first_line[last.col_offset :].decode(), *lines[last.lineno : last.end_lineno]])
    assert last.end_lineno is not None
    if last.end_lineno == last.lineno:
        assert last.end_col_offset is not None
        expression = first_line[last.col_offset : last.end_col_offset].decode()
    elif last.end_col_offset is not None:
        end = lines[last.end_lineno - 1].encode()[: last.end_col_offset].decode()
        expression = "\n".join([*expression.split("\n")[:-1], end])
    return "\n".join(before).strip("\n"), f"({expression})" if isinstance(last.value, ast.Tuple) else expression


def _handed_on(out: str | None, value: str, ranks: str) -> str:
    if out is None and (not value or value.startswith("print(")):
        return value
    value = value or "None"
    return f"job.keep({out!r}, {value}{ranks})" if out is not None else f"job.show({value}{ranks})"


def _on_ranks(code: str, value: str, out: str | None, ranks: tuple[int, ...] | None) -> Iterator[str]:
    """Yield the body of a cell. If only some ranks run it, all ranks pass its value on after the ``if``."""
    if ranks is None:
        yield from filter(None, [code, _handed_on(out, value, "")])
        return
    hands_on = out is not None or (value and not value.startswith("print("))
    if hands_on:
        yield "_value = None"
    yield f"if rank in {ranks!r}:"
    yield _indented("\n".join(filter(None, [code, f"_value = {value}" if hands_on and value else value])) or "pass")
    if hands_on:
        yield _handed_on(out, "_value", f", ranks={ranks!r}")


def _indented(code: str) -> str:
    """Indent code, but not the lines inside a multi-line string."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None:
            inside.update(range(node.lineno + 1, node.end_lineno + 1))
    lines = enumerate(code.split("\n"), start=1)
    return "\n".join(line if number in inside or not line else f"    {line}" for number, line in lines)


def _options(notebook: Path, name: str, line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for option, kind in (("--ranks", str), ("--timeout", str), ("--out", str), ("--needs", int), ("--expect", str)):
        parser.add_argument(option, type=kind, default=1 if kind is int else None)
    parser.add_argument("--tabs", action="store_true")  # this changes only the notebook's display
    try:
        options, rest = parser.parse_known_args(shlex.split(line))
    except (argparse.ArgumentError, ValueError) as error:
        raise ScriptError(notebook, name, f"its first line cannot be read: {error}") from None
    if rest:
        raise ScriptError(notebook, name, f"%%spmd has no option {' '.join(rest)}")
    return options


def _ranks(notebook: Path, name: str, text: str) -> tuple[int, ...]:
    """Return the ranks in ``--ranks 0-2,4``, which may include ranks that the script does not have."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            ranks += range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise ScriptError(notebook, name, f"--ranks {text} is not known before the notebook runs") from None
    return tuple(ranks)


def _parse(notebook: Path, name: str, source: str) -> ast.Module:
    try:
        plain = TransformerManager().transform_cell(source)
        tree = ast.parse(source) if plain.strip() == source.strip() else None
        if tree is not None:
            rest: Any = ast.Module([statement for statement in tree.body if not is_future(statement)], [])
            compile(rest, name, "exec", future_flags(tree), dont_inherit=True)
    except SyntaxError as error:
        raise ScriptError(notebook, name, f"{error.msg} in line {error.lineno}") from None
    except AttributeError as error:
        raise ScriptError(notebook, name, f"Python has no such feature: {error}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ScriptError(notebook, name, f"Python cannot read it: {str(error) or 'it is nested too deeply'}") from None
    if tree is None:
        raise ScriptError(notebook, name, "it uses a magic or `!`, which plain Python does not know")
    return tree
