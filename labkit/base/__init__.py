"""Code that all of labkit's packages share: names, limits, ranks, processes, folders. It imports none of them."""

from __future__ import annotations
