"""Keeps what torch compiles in a folder that only its user can write to.

torch puts it into ``torchinductor_USER`` in the temporary folder, which every user of the machine can write to, and runs what it
finds there. A neighbour who makes that name first decides what runs, or stops the import of ``torch._dynamo``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from labkit.base import places
from labkit.base.places import PlaceError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_NAMES = ("labkit", "torchinductor")


def private(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which torch keeps what it compiles in a private folder. The user's own setting stays."""
    if VARIABLE in environ:
        return dict(environ)
    return {**environ, VARIABLE: folder(environ)}


def folder(environ: Mapping[str, str]) -> str:
    """Return the folder, which is there and private. It is the same from process to process, so nothing is compiled twice.

    It is in the user's cache folder, with the machine's name in it: a home may be shared by machines with other processors. Where
    others can write to the way there, it is ``labkit-UID`` in the temporary folder, and where somebody has taken that
    name, a new one that goes with this process.

    Raises:
        PlaceError: There is no place that only the caller can change; see :func:`labkit.base.places.new_temporary`.
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME", "")
    base = Path(cache if os.path.isabs(cache) else os.path.join(home, ".cache"))
    machine = platform.node().replace("/", "_") or "machine"
    shared = (f"labkit-{os.geteuid()}", *_NAMES[1:])
    for place, names in ((base, (*_NAMES, machine)), *((temporary, shared) for temporary in places.temporary_folders())):
        # Something else may be there, the home may be missing or full: each is a reason to go on to the next place.
        with contextlib.suppress(PlaceError, OSError):
            return places.private_folder(place, *names)
    return _passing()


@functools.cache
def _passing() -> str:
    made = places.new_temporary("labkit-torch-")
    maker = os.getpid()
    # A forked process inherits this, and must leave the folder to the others.
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == maker else None)
    return made
