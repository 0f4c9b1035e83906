"""The version of labkit, which also holds where it runs from a checkout and is not installed."""

from __future__ import annotations

__version__ = "0.1.0"
