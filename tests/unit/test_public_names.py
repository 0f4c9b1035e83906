"""Exports of packages: the lists for type checkers and for use agree, no module shadows one, and the labs import nothing else."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAZY = [
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in sorted((ROOT / "labkit").rglob("__init__.py"))
    if "lazy_names(" in path.read_text()
]


def for_type_checkers(package: str) -> set[tuple[str, str]]:
    """The pairs of module and name that a package imports for type checkers."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {(str(node.module), name.name) for node in imports for name in node.names}


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_what_a_package_gives(package: str) -> None:
    module = importlib.import_module(package)
    listed = for_type_checkers(package)
    assert {name for _, name in listed} == {name for name in module.__all__ if name not in vars(module)}
    for home, name in listed:
        assert getattr(module, name) is getattr(importlib.import_module(home), name)


@pytest.mark.parametrize("package", LAZY)
def test_no_module_of_a_package_has_the_name_of_what_it_exports(package: str) -> None:
    folder = ROOT / package.replace(".", "/")
    modules = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
    assert modules.isdisjoint(importlib.import_module(package).__all__)


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_lab_imports_only_what_a_package_exports(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imports = re.findall(r"^\s*from (labkit[\w.]*) import ([\w, ]+)", source, flags=re.MULTILINE)
    assert imports
    deep = [
        f"from {package} import {name}"
        for package, names in imports
        for name in re.split(r", *", names.strip())
        if package not in LAZY and package != "labkit.course.labs"
    ]
    assert deep == []
