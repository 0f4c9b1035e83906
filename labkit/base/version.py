"""The version of labkit, available also in a checkout that is not installed."""

from __future__ import annotations

__version__ = "0.1.0"
