"""The common mistakes of learners, read from the source of the checks: each hint belongs to a mistake that a check recognizes.

The condition of a hint says which mistake that is. The source is read, not run, because checks import torch and start runs.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PACKAGE = "labkit.course.labs"
_MAX_CODE = 110


@dataclass(frozen=True)
class Mistake:
    """A mistake that a check recognizes.

    Attributes:
        seen: The condition by which the check recognizes it, in words or as the check's code in backticks; empty if the source does
            not show it.
        hint: The check's hint.
    """

    seen: str
    hint: str


@dataclass(frozen=True)
class Check:
    """A check, described by its own source.

    Attributes:
        name: Its name, such as ``lab04.check_eval_loss``.
        what: The first paragraph of its docstring.
        mistakes: The mistakes for which it has a hint, in source order, without hints that contain values of the run.
    """

    name: str
    what: str
    mistakes: tuple[Mistake, ...]


def checks_in(source: str) -> list[Check]:
    """Return the checks that a cell calls, such as ``lab04.check_eval_loss(pool)``, if they are functions of a lab."""
    names = dict.fromkeys(re.findall(r"\b(lab\d+)\.(check_\w+)\(", source))
    return [check for lab, function in names if (check := _check(lab, function)) is not None]


@cache
def _check(lab: str, function: str) -> Check | None:
    modules = [_definitions(ast.parse(path.read_text(encoding="utf-8"))) for path in _files(lab)]
    elsewhere = {name: node for module in modules for name, node in module.items()}
    for module in modules:
        top = elsewhere | module  # a check may take its hints from another file in its lab
        node = module.get(function)
        if isinstance(node, ast.FunctionDef):
            what = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            what = re.sub(r"^Exercise \d+: ", "", what)
            found: dict[str, Mistake] = {}
            for part in _reachable(node, top):
                for mistake in _mistakes(part, top):
                    if not found.get(mistake.hint, mistake).seen or mistake.hint not in found:
                        found[mistake.hint] = mistake
            return Check(f"{lab}.{function}", what.replace("``", "`"), tuple(found.values()))
    return None


def _files(lab: str) -> list[Path]:
    spec = importlib.util.find_spec(f"{_PACKAGE}.{lab}")
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    return sorted(origin.parent.glob("*.py")) if origin.name == "__init__.py" else [origin]


def _definitions(module: ast.Module) -> dict[str, ast.stmt]:
    """Return the top-level definitions of a module: functions, classes and variables by name."""
    found: dict[str, ast.stmt] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def _reachable(start: ast.stmt, top: dict[str, ast.stmt]) -> list[ast.stmt]:
    """Return a definition, followed by all that it refers to directly or indirectly."""
    found, waiting = [], [start]
    while waiting:
        node = waiting.pop(0)
        if node in found:
            continue
        found.append(node)
        waiting += [top[name.id] for name in ast.walk(node) if isinstance(name, ast.Name) and name.id in top]
    return found


# A hint with its condition.
_Place = tuple[ast.expr | None, ast.expr]


def _mistakes(node: ast.stmt, top: dict[str, ast.stmt]) -> Iterator[Mistake]:
    """Yield the mistakes in a definition, from the places where labs write hints."""
    for seen, hint in _places(node, top, None):
        for test, branch in _branches(hint):
            if text := _sentence(branch, top):
                yield Mistake(_seen(test or seen, top), text)


def _places(node: ast.AST, top: dict[str, ast.stmt], test: ast.expr | None, *, returns: bool = False) -> Iterator[_Place]:
    """Yield the hints below a node, innermost last.

    Args:
        node: The node to search.
        top: The definitions of the module.
        test: The condition under which the node is reached.
        returns: Whether a value returned here is a hint.
    """
    if isinstance(node, ast.FunctionDef):
        returns = "hint" in node.name
    elif (isinstance(node, ast.Return) and returns) or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "hint"):
        if node.value is not None:
            yield test, node.value
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and "HINT" in ast.unparse(node.targets[0]):
        yield from zip(node.value.keys, node.value.values, strict=True)
    elif isinstance(node, ast.Tuple) and len(node.elts) > 1 and (len(node.elts) > 2 or not _is_text(node.elts[0])):
        yield node.elts[0], node.elts[-1]  # the sign of a mistake first, its hint last
    elif isinstance(node, ast.Call):
        yield from _in_call(node, top, test)
    if isinstance(node, ast.If):
        yield from _places(node.test, top, test, returns=returns)
        for part in node.body:
            yield from _places(part, top, node.test, returns=returns)
        for part in node.orelse:
            yield from _places(part, top, None, returns=returns)
        return
    for child in ast.iter_child_nodes(node):
        yield from _places(child, top, test, returns=returns)


def _in_call(call: ast.Call, top: dict[str, ast.stmt], test: ast.expr | None) -> Iterator[_Place]:
    """Yield the hint that a call passes, with the mistake that another argument describes."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if isinstance(made := top.get(name), ast.ClassDef):
        fields = [part.target.id for part in made.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]
        position = fields.index("hint") if "hint" in fields else None
        told = next((part for part in call.args if _text(part, top)), None)
    else:
        position = {"refuse": 2, "hint_for": 2}.get(name)  # the last argument of hint_for is for all other mistakes
        told = None if name == "hint_for" else call.args[0] if call.args and _text(call.args[0], top) else test
    given = call.args[position : position + 1] if position is not None else []
    yield from ((told, hint) for hint in given)
    yield from (
        (None if word.arg == "otherwise" else told, word.value) for word in call.keywords if word.arg in ("hint", "otherwise")
    )


def _branches(place: ast.expr) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    """Yield the possible values of a conditional expression, each with its condition."""
    if isinstance(place, ast.IfExp):
        yield from ((test or place.test, branch) for test, branch in _branches(place.body))
        yield from _branches(place.orelse)
    else:
        yield None, place


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _seen(node: ast.expr | None, top: dict[str, ast.stmt]) -> str:
    """Return the sign of a mistake: its description, else the code of its test."""
    if node is None:
        return ""
    if _is_text(node):
        return (_text(node, top) or "").rstrip(".")
    test = top.get(node.id) if isinstance(node, ast.Name) else None
    if isinstance(test, ast.FunctionDef):
        words = (ast.get_docstring(test) or test.name.strip("_").replace("_", " ")).split("\n\n")[0]
        return " ".join(words.split()).replace("``", "`").rstrip(".")
    code = ast.unparse(node.body if isinstance(node, ast.Lambda) else node)
    # A bare name means nothing to readers who do not see the code.
    return f"`{code}`" if len(code) <= _MAX_CODE and not code.isidentifier() else ""


def _sentence(node: ast.expr, top: dict[str, ast.stmt]) -> str:
    """Return the text of a hint; empty if it is not a sentence, or contains a value known only during a run."""
    text = (_text(node, top) or "").strip()
    return text if " " in text and text[-1] in ".?" else ""


def _text(node: ast.expr, top: dict[str, ast.stmt]) -> str | None:
    """Return a literal as text, with the module's constants filled in; None if it contains anything else."""
    if isinstance(node, ast.JoinedStr):
        texts = [_text(part.value if isinstance(part, ast.FormattedValue) else part, top) for part in node.values]
        return None if None in texts else "".join(filter(None, texts))
    if isinstance(node, ast.Name) and isinstance(defined := top.get(node.id), ast.Assign | ast.AnnAssign) and defined.value:
        node = defined.value
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float) else None
