"""Parameters of which ``make test`` takes the first and ``make test-all`` the rest."""

from __future__ import annotations

from typing import Any

import pytest


def matrix(first: Any, *rest: Any) -> list[Any]:
    """Return values for ``params`` or ``parametrize``, those after the first marked slow."""
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in rest)]
