"""The import of nbformat at half its cost, for processes of labkit's own that read notebooks."""

from __future__ import annotations

import contextlib
import importlib
import sys

# jsonschema, which nbformat imports, makes 38 grammars of it at once. That is half of the time that a process takes to start which
# reads notebooks, and no schema of a notebook has an IRI to look at.
_GRAMMARS = "rfc3987_syntax"


def import_nbformat() -> None:
    """Import nbformat without the grammars of IRIs: in this process ``jsonschema`` will not look at formats of IRIs."""
    if _GRAMMARS in sys.modules or "jsonschema" in sys.modules:
        return
    sys.modules[_GRAMMARS] = None  # type: ignore[assignment]  # this is how Python notes that there is no such module
    try:
        with contextlib.suppress(ModuleNotFoundError):  # without the lab extra; whoever needs it says so
            importlib.import_module("nbformat")
    finally:
        del sys.modules[_GRAMMARS]
