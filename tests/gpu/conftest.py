"""What tests on GPUs share."""

from __future__ import annotations

import pytest

from labkit import machine


@pytest.fixture(scope="session")
def num_ranks() -> int:
    """For what needs no second rank but is more telling with one: as many ranks as there are GPUs, at most two."""
    return min(2, len(machine.nvidia_gpus()))
