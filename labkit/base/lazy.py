"""Lazy names of a package: each loads the module that defines it on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package (PEP 562).

    A module must not share a name with anything that its package exports: importing the module would shadow the export.

    Args:
        package: Its ``__name__``.
        homes: The names that each module defines, separated by spaces. Keys are module names relative to the package.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return get, names, sorted(home)
