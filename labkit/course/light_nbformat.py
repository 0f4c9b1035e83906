"""A faster import of nbformat, for labkit's own processes that read notebooks."""

from __future__ import annotations

import contextlib
import importlib
import sys

# jsonschema, which nbformat imports, builds 38 grammars from it at import. That takes half of the start-up time of a process that
# reads notebooks, and no notebook schema needs the grammars, since none has IRIs to validate.
_GRAMMARS = "rfc3987_syntax"


def import_nbformat() -> None:
    """Import nbformat without grammars for IRIs; then ``jsonschema`` does not validate IRIs in this process."""
    if _GRAMMARS in sys.modules or "jsonschema" in sys.modules:
        return
    sys.modules[_GRAMMARS] = None  # type: ignore[assignment]  # makes its import fail
    try:
        with contextlib.suppress(ModuleNotFoundError):  # the lab extra is missing; code that needs nbformat reports it
            importlib.import_module("nbformat")
    finally:
        del sys.modules[_GRAMMARS]
