"""Each promise in SECURITY.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_test_that_a_promise_names_exists() -> None:
    named = re.findall(r"`(tests/[^`]+)::([^`]+)`", TEXT)
    assert len(named) > 20
    assert [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)] == []


def test_each_promise_names_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| Promise")]
    assert [row for row in rows if "`tests/" not in row] == []
