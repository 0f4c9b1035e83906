"""Parameter lists: ``make test`` runs the first value, ``make test-all`` the rest."""

from __future__ import annotations

from typing import Any

import pytest


def matrix(first: Any, *rest: Any) -> list[Any]:
    """Return values for ``params`` or ``parametrize``, those after the first marked slow. A tuple is a row of several values."""
    return [first, *(pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow) for row in rest)]
