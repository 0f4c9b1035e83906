"""The versions of torch and Python that labkit's tests ran on; tests/VERSIONS.md has the counts."""

from __future__ import annotations

import re

TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHON = ("3.11", "3.12", "3.13")


def newer_than(tried: tuple[str, ...], version: str) -> bool:
    """Return whether a version, such as ``2.16.0+cpu``, is newer than all that were tried. Patch releases do not count."""
    return _numbers(version) > max(map(_numbers, tried))


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
