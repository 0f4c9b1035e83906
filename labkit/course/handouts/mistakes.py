"""What learners commonly get wrong, read from the checks themselves: each hint in a check stands for a mistake that it knows.

The source is read, not run: checks import torch and start runs.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PACKAGE = "labkit.course"


@dataclass(frozen=True)
class Check:
    """What the source of a check says.

    Attributes:
        name: Its name, such as ``lab04.check_eval_loss``.
        what: The first paragraph of its docstring.
        hints: The hints that it gives, in the order of the source.
    """

    name: str
    what: str
    hints: tuple[str, ...]


def checks_in(source: str) -> list[Check]:
    """The checks that a cell calls, such as ``lab04.check_eval_loss(pool)``; those that are no function of a lab are left out."""
    names = dict.fromkeys(re.findall(r"\b(lab\d+)\.(check_\w+)\(", source))
    return [check for lab, function in names if (check := _check(lab, function)) is not None]


@cache
def _check(lab: str, function: str) -> Check | None:
    for path in _files(lab):
        top = _definitions(ast.parse(path.read_text(encoding="utf-8")))
        node = top.get(function)
        if isinstance(node, ast.FunctionDef):
            what = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            what = re.sub(r"^Exercise \d+: ", "", what)
            hints = dict.fromkeys(hint for part in _reachable(node, top) for hint in _hints(part, top))
            return Check(f"{lab}.{function}", what.replace("``", "`"), tuple(hints))
    return None


def _files(lab: str) -> list[Path]:
    spec = importlib.util.find_spec(f"{_PACKAGE}.{lab}")
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    return sorted(origin.parent.glob("*.py")) if origin.name == "__init__.py" else [origin]


def _definitions(module: ast.Module) -> dict[str, ast.stmt]:
    """What a module defines at its top: functions, classes and variables by name."""
    found: dict[str, ast.stmt] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def _reachable(start: ast.stmt, top: dict[str, ast.stmt]) -> list[ast.stmt]:
    """The definitions that one leads to, itself first."""
    found, waiting = [], [start]
    while waiting:
        node = waiting.pop(0)
        if node in found:
            continue
        found.append(node)
        waiting += [top[name.id] for name in ast.walk(node) if isinstance(name, ast.Name) and name.id in top]
    return found


def _hints(node: ast.stmt, top: dict[str, ast.stmt]) -> Iterator[str]:
    """The texts in a definition that are hints, by the places in which the labs write them."""
    places: list[ast.expr] = []
    if isinstance(node, ast.FunctionDef) and "hint" in node.name:
        places += [part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None]
    for part in ast.walk(node):
        if isinstance(part, ast.Assign) and any(isinstance(name, ast.Name) and name.id == "hint" for name in part.targets):
            places.append(part.value)
        elif isinstance(part, ast.Tuple) and len(part.elts) > 1 and (len(part.elts) > 2 or not _is_text(part.elts[0])):
            places.append(part.elts[-1])  # what shows a mistake, and last its hint
        elif isinstance(part, ast.Dict) and isinstance(node, ast.Assign) and "HINT" in ast.unparse(node.targets[0]):
            places += part.values
        elif isinstance(part, ast.Call):
            places += _in_call(part, top)
    for place in places:
        yield from filter(None, map(_sentence, _branches(place)))


def _in_call(call: ast.Call, top: dict[str, ast.stmt]) -> list[ast.expr]:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    named = [keyword.value for keyword in call.keywords if keyword.arg in ("hint", "otherwise")]
    position = {"refuse": 2, "hint_for": 2}.get(name)
    if isinstance(made := top.get(name), ast.ClassDef):
        fields = [part.target.id for part in made.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]
        position = fields.index("hint") if "hint" in fields else None
    return named + (call.args[position : position + 1] if position is not None else [])


def _branches(place: ast.expr) -> Iterator[ast.expr]:
    if isinstance(place, ast.IfExp):
        yield from _branches(place.body)
        yield from _branches(place.orelse)
    else:
        yield place


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _sentence(node: ast.expr) -> str:
    """The text of a literal, values in code style; empty when it is no sentence."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"`{ast.unparse(part.value)}`"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    else:
        return ""
    return text.strip() if " " in text.strip() and text.strip()[-1] in ".?" else ""
