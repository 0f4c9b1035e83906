"""The import of matplotlib for handouts: nothing in the working directory steers it."""

from __future__ import annotations

import functools
import os
from types import ModuleType


@functools.cache
def own_matplotlib() -> ModuleType:
    """Import matplotlib and return it. Of its settings, use :func:`matplotlib.rcdefaults` only.

    While it is imported it reads a ``matplotlibrc`` of the working directory before any other. There others may have put it: a FIFO
    would hold the command, and a setting could make TeX run.
    """
    here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir("/")
        try:
            import matplotlib as mpl
        finally:
            os.fchdir(here)
    finally:
        os.close(here)
    return mpl
