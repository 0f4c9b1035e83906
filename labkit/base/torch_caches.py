"""A folder for torch's compiler cache that only its user can write to.

By default torch compiles into ``torchinductor_USER`` in the temporary folder, which every user of the machine can write to, and
runs what it finds there. A neighbour who makes that name first decides what runs, or makes the import of ``torch._dynamo`` fail.
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
    """Return an environment in which torch compiles into a private folder, unless the user has chosen a folder."""
    if VARIABLE in environ:
        return dict(environ)
    return {**environ, VARIABLE: folder(environ)}


def folder(environ: Mapping[str, str]) -> str:
    """Return the private folder, and make it if it is missing. Processes share it, so nothing is compiled twice.

    It is in the user's cache folder, under the machine's name: machines with different processors may share a home. If others can
    write to a folder on the way, it is in ``labkit-UID`` in the temporary folder. If somebody has taken that name too, it is a new
    folder that is deleted when this process ends.

    Raises:
        PlaceError: There is no place that only the caller can change; see :func:`labkit.base.places.new_temporary`.
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME", "")
    base = Path(cache if os.path.isabs(cache) else os.path.join(home, ".cache"))
    machine = platform.node().replace("/", "_") or "machine"
    shared = (f"labkit-{os.geteuid()}", *_NAMES[1:])
    for place, names in ((base, (*_NAMES, machine)), *((temporary, shared) for temporary in places.temporary_folders())):
        # The name may be taken, the home missing or full: then try the next place.
        with contextlib.suppress(PlaceError, OSError):
            return places.private_folder(place, *names)
    return _passing()


@functools.cache
def _passing() -> str:
    made = places.new_temporary("labkit-torch-")
    maker = os.getpid()
    # A forked process inherits this handler, and must not delete the folder.
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == maker else None)
    return made
