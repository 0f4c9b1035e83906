"""A neighbour's folder: modules with the names of all standard and installed modules; they leave a mark when imported."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path


def plant(folder: Path, mark: Path) -> None:
    """Write the modules. When imported, each writes its own name and its importer's into ``mark``."""
    told = f"""
import sys
frame, places = sys._getframe(), []
while frame and len(places) < 30:
    if "importlib" not in frame.f_code.co_filename:
        places.append(f"{{frame.f_code.co_filename}}:{{frame.f_lineno}}")
    frame = frame.f_back
with open({str(mark)!r}, "a") as file:
    file.write(__name__ + " " + " < ".join(places[1:6]) + "\\n")
raise ImportError("planted")
"""
    installed = {module.name for module in pkgutil.iter_modules() if not (folder / module.name).exists()}
    for name in sorted(sys.stdlib_module_names | installed):
        (folder / f"{name}.py").write_text(told)
