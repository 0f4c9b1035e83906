"""Starts Python for labkit's own processes: what they import and leave out, and where torch keeps what it compiles."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.base import torch_caches


def own_python(*arguments: str, program: str = sys.executable) -> list[str]:
    """Return the command that runs this Python, or another one, with arguments such as ``-m labkit.plan.child``.

    Without ``-P`` Python imports from the working directory first for ``-m`` and ``-c``. In a folder that others can write to,
    somebody's ``torch.py`` would run there.
    """
    return [program, "-P", *arguments]


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for such a process: with this process's import path, and a private folder for torch's caches."""
    return torch_caches.private(environ) | {"PYTHONPATH": import_path()}


def with_folder(path: Sequence[str], folder: str) -> list[str]:
    """Return an import path with a folder of the user's where IPython puts a kernel's: behind the standard library.

    What is installed stands behind it, as under Jupyter, so the user's own module of that name is found first.
    """
    kept = [entry for entry in path if entry not in ("", folder)]
    own = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    python = {*own, *(os.path.join(entry, "lib-dynload") for entry in own)}
    # PYTHONPATH may name such a folder too, in front of the standard library.
    first = max((place + 1 for place, entry in enumerate(kept) if entry in python), default=0)
    installed = (place for place in range(first, len(kept)) if os.path.basename(kept[place]) in ("site-packages", "dist-packages"))
    place = next(installed, len(kept))
    return [*kept[:place], folder, *kept[place:]]


def import_path() -> str:
    """Return the ``PYTHONPATH`` for such a process: this process's import path without the working directory.

    Relative entries are left out as well: they depend on the working directory. labkit's own folder is there in any case.
    """
    home = str(Path(__file__).parents[2])
    folders = [folder for folder in sys.path if os.path.isabs(folder)]
    return os.pathsep.join(folders if home in folders else [home, *folders])
