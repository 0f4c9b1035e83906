"""The scripts in .ci as modules; they have no suffix, so an import statement does not find them."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / ".ci"


def load(name: str) -> ModuleType:
    """A fresh module made from the script ``.ci/<name>``."""
    loader = SourceFileLoader(f"ci_{name}", str(FOLDER / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
