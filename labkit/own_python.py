"""Starts Python for labkit's own processes, which import what this one imports and nothing else.

And what such a process leaves out of what it imports.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path

# jsonschema, which nbformat imports, makes 38 grammars of it at once. That is half of the time that a process takes to start which
# reads notebooks, and no schema of a notebook has an IRI to look at.
_GRAMMARS = "rfc3987_syntax"


def own_python(*arguments: str) -> list[str]:
    """Return the command that runs this Python with arguments such as ``-m labkit.plan.child``.

    Without ``-P`` Python imports from the working directory first for ``-m`` and ``-c``. In a folder that others can write to,
    somebody's ``torch.py`` would run there.
    """
    return [sys.executable, "-P", *arguments]


def import_path() -> str:
    """Return the ``PYTHONPATH`` for such a process: this process's import path without the working directory.

    Relative entries are left out as well: they depend on the working directory. labkit's own folder is there in any case.
    """
    home = str(Path(__file__).parents[1])
    folders = [folder for folder in sys.path if os.path.isabs(folder)]
    return os.pathsep.join(folders if home in folders else [home, *folders])


def import_nbformat() -> None:
    """Import nbformat at half its cost, in a process of labkit's own: there ``jsonschema`` will not look at formats of IRIs."""
    if _GRAMMARS in sys.modules or "jsonschema" in sys.modules:
        return
    sys.modules[_GRAMMARS] = None  # type: ignore[assignment]  # this is how Python notes that there is no such module
    try:
        with contextlib.suppress(ModuleNotFoundError):  # without the lab extra; whoever needs it says so
            importlib.import_module("nbformat")
    finally:
        del sys.modules[_GRAMMARS]
