"""Starts Python for labkit's own processes, which import what this one imports and nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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
