"""Names that travel between the notebook's namespace and the rank's."""

from __future__ import annotations

import sys
from typing import Any


class LentNames:
    """Functions and classes of the notebook, under their names in the rank's ``__main__``.

    Pickle finds a class there by its name. A name that a cell on the rank has set is not replaced.

    Args:
        namespace: The rank's namespace.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._lent: dict[str, Any] = {}

    def lend(self, things: dict[str, Any]) -> None:
        """Set the functions and classes that came with a value, also over earlier ones of the same name."""
        for name, thing in things.items():
            if name not in self._namespace or self._namespace[name] is self._lent.get(name):
                self._namespace[name] = self._lent[name] = thing


def lend_namespace(function: Any, namespace: dict[str, Any]) -> None:
    """Let a function from the notebook see the rank's variables.

    cloudpickle gives a function from a notebook a namespace with the globals it uses in the kernel. Names that are not there, such
    as ``rank`` or a model made in a %%spmd cell, are looked up on the rank.
    """
    own = getattr(function, "__globals__", None)
    home = sys.modules.get(getattr(function, "__module__", "") or "")
    if own is None or own is namespace or (home is not None and home.__dict__ is own):
        return
    for name, value in namespace.items():
        own.setdefault(name, value)
