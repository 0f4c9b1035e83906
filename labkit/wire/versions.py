"""The versions that must be the same on both sides of the wire."""

from __future__ import annotations

import platform

from labkit.base.version import __version__


def versions() -> dict[str, str]:
    """Return the versions by name: code travels as this Python's byte code, messages as this labkit's classes."""
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "labkit": __version__}
