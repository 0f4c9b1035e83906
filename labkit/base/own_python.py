"""Commands and environments for labkit's own Python processes: the import path and the folder of torch's caches."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.base import torch_caches


def own_python(*arguments: str, program: str = sys.executable) -> list[str]:
    """Return the command that runs this Python, or another one, with arguments such as ``-m labkit.plan.child``.

    Without ``-P``, Python with ``-m`` or ``-c`` imports from the working directory first. If others can write to that folder, their
    ``torch.py`` would run.
    """
    return [program, "-P", *arguments]


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process of labkit's: this process's import path, and a private folder for torch's caches."""
    return torch_caches.private(environ) | {"PYTHONPATH": import_path()}


def with_folder(path: Sequence[str], folder: str) -> list[str]:
    """Return an import path with the user's folder inserted where IPython puts a kernel's: after the standard library.

    Installed packages come after it, as under Jupyter, so the user's own module wins over an installed one of the same name.
    """
    kept = [entry for entry in path if entry not in ("", folder)]
    own = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    python = {*own, *(os.path.join(entry, "lib-dynload") for entry in own)}
    # PYTHONPATH may list such a folder too, before the standard library.
    first = max((place + 1 for place, entry in enumerate(kept) if entry in python), default=0)
    installed = (place for place in range(first, len(kept)) if os.path.basename(kept[place]) in ("site-packages", "dist-packages"))
    place = next(installed, len(kept))
    return [*kept[:place], folder, *kept[place:]]


def import_path() -> str:
    """Return the ``PYTHONPATH`` for a process of labkit's: this process's import path without the working directory.

    Relative entries are left out as well, because they depend on the working directory. labkit's own folder is always included.
    """
    home = str(Path(__file__).parents[2])
    folders = [folder for folder in sys.path if os.path.isabs(folder)]
    return os.pathsep.join(folders if home in folders else [home, *folders])
