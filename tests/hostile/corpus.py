"""All hostile files, in one order."""

from __future__ import annotations

from tests.hostile import archives, folders, indices, pickles
from tests.hostile.attacks import ATTACKS, Hostile

MODULES = (pickles, archives, indices, folders)  # importing them registers their attacks
PENDING: dict[str, str] = {}
"""Those that labkit does not withstand yet, by name, with what happens."""
EVERY = [Hostile(kind, number) for kind, (count, _) in ATTACKS.items() for number in range(count)]
